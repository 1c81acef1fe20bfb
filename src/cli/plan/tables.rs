//! A decision of the planner as tables.

use crate::data::Batch;
use crate::plan::{Alternative, Decision, Forecast, Machine, PlannedPeak, StepPart};
use crate::report::console;
use crate::report::table::Table;
use crate::units::{Bytes, Fault, Seconds, counted};

/// Alternatives that are shown in addition to the chosen one.
const SHOWN: usize = 12;

pub(super) fn print(decision: &Decision, others: &[Alternative], machine: Machine, batch: &Batch) -> Result<(), Fault> {
    let chosen = &decision.chosen;
    let Forecast { device, host, .. } = &chosen.forecast;
    if let (Some(on_device), Some(host)) = (chosen.device, host) {
        console::result(&(console::fitted(&parts("the device's memory at its peak", device, on_device)) + "\n"))?;
        console::table(&parts("the host's memory at its peak", host, chosen.host))?;
    } else {
        console::table(&parts("memory at the peak", device, chosen.host))?;
    }
    if chosen.forecast.files.0 > 0 {
        let free = machine.limits.files.map_or(String::new(), |bytes| format!(" of {bytes} that are free"));
        console::result(&format!("\nin files: {}{free}", chosen.forecast.files))?;
    }
    console::result(&format!("\n{}", console::fitted(&alternatives(chosen, others))))?;
    let limit = |limit: Option<Bytes>| limit.map_or("unknown".to_owned(), |bytes| bytes.to_string());
    let there = match chosen.device {
        Some(_) => format!("{} on the device and {} on the host", limit(machine.limits.device), limit(machine.limits.host)),
        None => limit(machine.limits.host),
    };
    let (sequences, tokens) = (counted(batch.sequences.len(), "sequence"), counted(batch.max_len(), "token"));
    let why = "exact stores come before rounded ones, memory before files, then the fewest operations, then the largest cells";
    console::result(&format!(
        "\nPlanned for {sequences} of {tokens}; memory: {there}. Of the tilings that fit, {why}:\n\n    {}",
        chosen.grad.tiling()
    ))?;
    Ok(())
}

/// The parts of a peak that are not empty. What the whole has in addition to tensors is the process' own.
fn parts(title: &str, peak: &PlannedPeak, whole: Bytes) -> Table {
    let mut table = Table::new(&[title, "size", "of the whole"]);
    let mut add = |name: &str, bytes: Bytes| {
        let share = 100.0 * bytes.0 as f64 / whole.0.max(1) as f64;
        table.row(&[name, &bytes.to_string(), &format!("{share:.1} %")]);
    };
    let process = Bytes(whole.0.saturating_sub(peak.bytes().0));
    let parts = peak.parts.iter().copied().chain([("process and libraries", process)]);
    parts.filter(|(_, bytes)| bytes.0 > 0).for_each(|(name, bytes)| add(name, bytes));
    add(&format!("peak, in {}", peak.part.name()), whole);
    table
}

/// The chosen tiling and others, with the fewest operations first. Times are estimates.
fn alternatives(chosen: &Alternative, others: &[Alternative]) -> Table {
    let mut header = vec!["layers × chunks per cell", "graphs kept", "layer checkpoints", "undo log", "attention outputs"];
    header.extend(if chosen.device.is_some() { &["device's peak", "host's peak"][..] } else { &["peak"] });
    header.push("files");
    header.extend(StepPart::ALL.map(StepPart::name));
    header.extend(["step", "fits"]);
    let mut table = Table::new(&header);
    let is_chosen = |other: &&Alternative| other.grad == chosen.grad;
    for other in std::iter::once(chosen).chain(others.iter().filter(|other| !is_chosen(other)).take(SHOWN)) {
        let width = other.grad.chunks_per_cell.map_or("by cache".to_owned(), |chunks| chunks.to_string());
        let mut cells = vec![
            format!("{} × {width}{}", other.grad.layers_per_cell, if is_chosen(&other) { " (chosen)" } else { "" }),
            format!("{} of {}", other.kept, other.cells.0 * other.cells.1),
            other.grad.layer_checkpoints.to_string(),
            other.grad.undo_log.to_string(),
            other.grad.attention_outputs.name().to_owned(),
        ];
        cells.extend(other.device.into_iter().chain([other.host, other.forecast.files]).map(|bytes| bytes.to_string()));
        let time = |seconds: Option<f64>| seconds.map_or("–".to_owned(), |seconds| format!("~{}", Seconds(seconds)));
        cells.extend((0..StepPart::ALL.len()).map(|part| time(other.seconds.map(|seconds| seconds[part]))));
        cells.push(time(other.seconds.map(|seconds| seconds.iter().sum())));
        cells.push(if other.fits { "yes" } else { "no" }.to_owned());
        table.row(&cells);
    }
    table
}
