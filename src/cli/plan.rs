//! `kvtune plan`: the memory of a step before it is made, an estimate of its time, and the tiling that suits the machine.

use clap::Args;
use serde_json::{Value, json};
use tch::Device;

use super::recipe_file::RecipeFile;
use super::values::{at_least_one, bytes};
use super::world::Joining;
use crate::data::{Batch, Tokenizer};
use crate::dist::ProcessGroup;
use crate::measure::{gemm_rate, random_batch};
use crate::model::{ModelConfig, kind_of};
use crate::plan::{Alternative, Decision, Forecast, Machine, PlannedPeak, StepPart};
use crate::recipe::Recipe;
use crate::report::console;
use crate::report::table::Table;
use crate::train;
use crate::units::{Bytes, Fault, Seconds, counted};

/// Alternatives that are shown in addition to the chosen one.
const SHOWN: usize = 12;

/// Predict memory and time of a step, and choose the best tiling.
#[derive(Debug, Args)]
pub(super) struct Plan {
    #[command(flatten)]
    recipe: RecipeFile,
    /// Plan for sequences of N tokens, all of them targets, instead of the heaviest batch of the recipe's data.
    #[arg(long, value_name = "N", value_parser = at_least_one())]
    tokens: Option<usize>,
    /// Plan for a GPU with this much memory, for example `40GB` or `80GiB`. If this machine has no GPU, no time is estimated.
    #[arg(long, value_name = "BYTES", value_parser = bytes())]
    device_memory: Option<Bytes>,
    /// Host memory limit. Default: the available memory.
    #[arg(long, value_name = "BYTES", value_parser = bytes())]
    host_memory: Option<Bytes>,
    /// Disk space for scratch files. Default: the free space of `grad.scratch_dir`, else of `output_dir`.
    #[arg(long, value_name = "BYTES", value_parser = bytes())]
    scratch_space: Option<Bytes>,
    #[command(flatten)]
    pub(super) joining: Joining,
}

impl Plan {
    pub(super) fn run(&self, device: Device, world: &ProcessGroup) -> Result<(), Fault> {
        let recipe = self.recipe.load(device)?;
        train::check_even(world, &recipe)?;
        let config = train::as_headed(&recipe, ModelConfig::load(&recipe.model)?)?;
        train::check_trained(&recipe, &config)?;
        train::check_data(&recipe, &config)?;
        let mut machine = Machine::here(recipe.model.dtype, device).of_ranks(world.ranks_here(), world.size());
        let here = machine;
        let batch = machine.including(|| self.batch(&recipe, &config, here))?;
        let machine = self.machine(&recipe, machine);
        if world.size() > 1 {
            let (ranks, here) = (world.size(), world.ranks_here());
            console::note(&format!("for one of {ranks} ranks, {here} of which share this machine's memory and disk"));
        }
        let decision = train::plan(&recipe, &config, &batch, machine, |planner| planner.decide(&recipe.grad))?;
        let Decision { chosen, alternatives: mut others } = decision;
        if recipe.grad.open.is_empty() {
            others = train::plan(&recipe, &config, &batch, machine, |planner| planner.alternatives(&recipe.grad))?;
        }
        others.retain(|other| other.grad != chosen.grad);
        if console::speech().is_json {
            print_json(&chosen, &others, machine)
        } else {
            print_tables(&chosen, &others, machine, &batch)
        }
    }

    /// The heaviest that will come.
    fn batch(&self, recipe: &Recipe, config: &ModelConfig, machine: Machine) -> Result<Batch, Fault> {
        let Some(tokens) = self.tokens else {
            let tokenizer = Tokenizer::load_if_present(&recipe.model.path)?;
            let data = train::open_data(recipe, config, tokenizer.as_ref())?;
            console::note(&data.to_string());
            train::check_answers(recipe, &data)?;
            return train::heaviest(recipe, config, &data.train, machine);
        };
        random_batch(recipe, config, &[tokens], recipe.train.seed)
    }

    /// What is planned for: this machine, but for what the arguments say of it.
    fn machine(&self, recipe: &Recipe, mut machine: Machine) -> Machine {
        if self.device_memory.is_none() || machine.device.is_cuda() {
            machine.rate = Some(gemm_rate(kind_of(recipe.model.dtype), machine.device).per_second);
        } else {
            machine.device = Device::Cuda(0);
        }
        machine.limits.device = self.device_memory.or(machine.limits.device);
        machine.limits.host = self.host_memory.or(machine.limits.host);
        machine = machine.with_disk(train::disk_of_run(recipe, None));
        machine.limits.files = self.scratch_space.or(machine.limits.files);
        machine
    }
}

/// Keys as `docs/reference/plan.md` has them; `kind` says what the line is.
pub(super) fn in_json(kind: &str, alternative: &Alternative) -> Value {
    let Alternative { grad, num_bands, num_columns, kept, forecast, device, host, operations, seconds, fits } = alternative;
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
        "attention_outputs": grad.attention_outputs.name(), "layer_bands": num_bands, "columns": num_columns, "kept_cells": kept,
        "process_bytes": host.0, "device_bytes": device.map(|bytes| bytes.0), "file_bytes": forecast.files.0,
        "tensors": peak(&forecast.device), "host_tensors": forecast.host.as_ref().map(peak),
        "operations": operations, "seconds": seconds.as_ref().map(by_part),
    })
}

fn print_json(chosen: &Alternative, others: &[Alternative], machine: Machine) -> Result<(), Fault> {
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

fn print_tables(chosen: &Alternative, others: &[Alternative], machine: Machine, batch: &Batch) -> Result<(), Fault> {
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
            ("graphs kept", format!("{} of {}", other.kept, other.num_bands * other.num_columns)),
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
