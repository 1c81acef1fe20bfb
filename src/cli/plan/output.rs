//! A decision of the planner, as lines of JSON and as tables.

use serde_json::{Value, json};

use crate::data::Batch;
use crate::plan::{Alternative, Forecast, Machine, PlannedPeak, StepPart};
use crate::report::console;
use crate::report::table::Table;
use crate::units::{Bytes, Fault, Seconds, counted};

/// Alternatives that are shown in addition to the chosen one.
const SHOWN: usize = 12;

/// Keys as `docs/reference/plan.md` has them; `kind` says what the line is.
pub(in crate::cli) fn in_json(kind: &str, alternative: &Alternative) -> Value {
    let Alternative { grad, cells, kept, forecast, device, host, operations, seconds, fits } = alternative;
    let peak = |peak: &PlannedPeak| {
        let parts: Vec<Value> = peak.parts.iter().map(|(part, bytes)| json!({ "part": part, "bytes": bytes.0 })).collect();
        json!({ "peak_in": peak.part.name(), "tensor_bytes": peak.bytes().0, "parts": parts })
    };
    let by_part = |seconds: &[f64; 6]| {
        let parts = StepPart::ALL.into_iter().zip(seconds);
        Value::Object(parts.map(|(part, seconds)| (part.name().to_owned(), json!(seconds))).collect())
    };
    json!({
        "kind": kind, "fits": fits, "layers_per_cell": grad.layers_per_cell, "chunks_per_cell": grad.chunks_per_cell,
        "layer_checkpoints": grad.layer_checkpoints.form.name(), "layer_checkpoints_place": grad.layer_checkpoints.place.name(),
        "undo_log": grad.undo_log.form.name(), "undo_log_place": grad.undo_log.place.name(),
        "attention_outputs": grad.attention_outputs.name(), "layer_bands": cells.0, "columns": cells.1, "kept_cells": kept,
        "process_bytes": host.0, "device_bytes": device.map(|bytes| bytes.0), "file_bytes": forecast.files.0,
        "tensors": peak(&forecast.device), "host_tensors": forecast.host.as_ref().map(peak),
        "operations": operations, "seconds": seconds.as_ref().map(by_part),
    })
}

pub(super) fn print_json(chosen: &Alternative, others: &[Alternative], machine: Machine) -> Result<(), Fault> {
    let limit = |bytes: Option<Bytes>| bytes.map(|bytes| bytes.0);
    let setup = json!({
        "kind": "machine", "device": if machine.device.is_cuda() { "cuda" } else { "cpu" }, "threads": machine.threads,
        "baseline_bytes": machine.baseline.bytes().0, "host_limit_bytes": limit(machine.limits.host), "device_limit_bytes": limit(machine.limits.device),
        "scratch_limit_bytes": limit(machine.limits.files), "is_timed": machine.rate.is_some(),
    });
    console::result(&setup.to_string())?;
    console::result(&in_json("chosen", chosen).to_string())?;
    others.iter().try_for_each(|other| console::result(&in_json("alternative", other).to_string()))
}

pub(super) fn print_tables(chosen: &Alternative, others: &[Alternative], machine: Machine, batch: &Batch) -> Result<(), Fault> {
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
    ))
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
    let row = |(index, other): (usize, &Alternative)| {
        let width = other.grad.chunks_per_cell.map_or("by cache".to_owned(), |chunks| chunks.to_string());
        let mark = if index == 0 { " (chosen)" } else { "" };
        let time = |seconds: Option<f64>| seconds.map_or("–".to_owned(), |seconds| format!("~{}", Seconds(seconds)));
        let of_part = |(index, part): (usize, StepPart)| (part.name(), time(other.seconds.map(|seconds| seconds[index])));
        let mut cells = vec![
            ("layers × chunks per cell", format!("{} × {width}{mark}", other.grad.layers_per_cell)),
            ("graphs kept", format!("{} of {}", other.kept, other.cells.0 * other.cells.1)),
            ("layer checkpoints", other.grad.layer_checkpoints.to_string()),
            ("undo log", other.grad.undo_log.to_string()),
            ("attention outputs", other.grad.attention_outputs.name().to_owned()),
        ];
        cells.extend(other.device.map(|bytes| ("device's peak", bytes.to_string())));
        cells.push((if other.device.is_some() { "host's peak" } else { "peak" }, other.host.to_string()));
        cells.push(("files", other.forecast.files.to_string()));
        cells.extend(StepPart::ALL.into_iter().enumerate().map(of_part));
        cells.push(("step", time(other.seconds.map(|seconds| seconds.iter().sum()))));
        cells.push(("fits", if other.fits { "yes" } else { "no" }.to_owned()));
        cells
    };
    Table::of_named(std::iter::once(chosen).chain(others.iter().take(SHOWN)).enumerate().map(row))
}
