//! `kvtune bench`: training steps on random tokens, timed part by part.

use std::rc::Rc;

use clap::Args;
use serde_json::json;
use tch::Device;

use super::plan::in_json;
use super::recipe_file::RecipeFile;
use super::values::{any_number, at_least_one};
use super::world::Joining;
use crate::dist::ProcessGroup;
use crate::measure::{BenchSummary, StepRecord, summarise};
use crate::native::cuda::why_not_pinned;
use crate::native::libtorch_version;
use crate::plan::StepPart;
use crate::report::console::{self, not_pinned, planned_and_measured};
use crate::report::table::Table;
use crate::train::{Bench, BenchOptions};
use crate::units::{Bytes, Fault, Seconds, counted};

/// Time training steps on random tokens, part by part.
#[derive(Debug, Args)]
pub(super) struct BenchSteps {
    #[command(flatten)]
    recipe: RecipeFile,
    /// Tokens of each of the `train.micro_batch_size` sequences; or one number for each, separated by commas.
    #[arg(long, value_name = "N", required = true, value_delimiter = ',', value_parser = at_least_one())]
    tokens: Vec<usize>,
    /// Steps to time.
    #[arg(long, value_name = "K", value_parser = at_least_one())]
    steps: usize,
    /// Warm-up steps, which are shown but not counted.
    #[arg(long, value_name = "W", default_value_t = 1, value_parser = any_number())]
    warmup: usize,
    /// Use random weights, drawn on the device; of the model's directory only `config.json` is read.
    #[arg(long)]
    random_weights: bool,
    /// Print the memory of the last step by part.
    #[arg(long)]
    profile_memory: bool,
    #[command(flatten)]
    pub(super) joining: Joining,
}

impl BenchSteps {
    pub(super) fn run(&self, device: Device, world: &Rc<ProcessGroup>) -> Result<(), Fault> {
        let recipe = self.recipe.load(device)?;
        let options = BenchOptions {
            tokens: self.tokens.clone(),
            warm_up: self.warmup,
            profiles_memory: self.profile_memory,
            draws_weights: self.random_weights,
        };
        let mut bench = Bench::new(recipe, device, options, world)?;
        let is_json = console::speech().is_json;
        self.introduce(&bench, world)?;
        let mut records = Vec::new();
        let all = self.warmup + self.steps;
        for number in 1..=all {
            let record = bench.step()?;
            if is_json {
                console::result(&record.to_json().to_string())?;
            } else {
                console::note(&format!("step {number} of {all}: {}", Seconds(record.whole.seconds)));
            }
            records.push(record);
        }
        if let Some(why) = why_not_pinned() {
            console::note(&not_pinned(&why));
        }
        let (Some(summary), Some(last)) = (summarise(&records), records.last()) else { return Ok(()) };
        if is_json {
            console::result(&summary.to_json().to_string())?;
            console::result(&in_json("forecast", &bench.planned).to_string())?;
            return last.memory.iter().try_for_each(|profile| console::result(&profile.to_json().to_string()));
        }
        console::table(&table(&records, &summary))?;
        for profile in &last.memory {
            console::result(&format!("\n{profile}"))?;
        }
        if let Some(peak) = last.peak {
            console::result(&format!("\n{}", planned_and_measured(bench.planned.host, peak)))?;
        }
        Ok(())
    }

    fn introduce(&self, bench: &Bench, world: &ProcessGroup) -> Result<(), Fault> {
        let (config, device, threads) = (bench.model.config(), bench.model.device(), tch::get_num_threads());
        let device = if let Device::Cuda(index) = device { format!("cuda:{index}") } else { "cpu".to_owned() };
        let (dtype, libtorch, attention) = (bench.recipe.model.dtype, libtorch_version(), bench.attention());
        let sequences = bench.recipe.train.batch_size.sequences();
        let trained = bench.model.parameters().iter().map(|(_, leaf)| leaf.numel()).sum::<usize>();
        if console::speech().is_json {
            let line = json!({
                "kind": "setup", "version": env!("CARGO_PKG_VERSION"), "libtorch": libtorch, "device": device,
                "ranks": world.size(), "threads": threads, "dtype": dtype.to_string(), "sequences": sequences, "tokens_per_sequence": self.tokens,
                "parameters": config.num_parameters(), "trained_parameters": trained,
                "attention": attention,
            });
            return console::result(&line.to_string());
        }
        let ranks = if world.size() > 1 { format!("each of {} ranks: ", world.size()) } else { String::new() };
        let line = format!(
            "{ranks}{} of {} tokens; {} parameters in {dtype}, {trained} trained; {device}, {threads} threads, libtorch {libtorch}; attention: \
             {attention}",
            counted(sequences, "sequence"),
            self.tokens.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
            config.num_parameters(),
        );
        console::result(&line)
    }
}

/// A row for each step, and one each for the median, the least and the most of every figure.
fn table(records: &[StepRecord], summary: &BenchSummary) -> Table {
    let copies = records.first().map_or("copies", |record| record.copies.names().0);
    // Figures, which `get` knows by their keys.
    let row = |name: String, get: &dyn Fn(&str) -> Option<f64>| {
        let figure = |key: &str| get(key).unwrap_or(f64::NAN);
        let time =
            |part: &str| format!("{:.3} / {:.3}", figure(&format!("{part}_seconds")), figure(&format!("{part}_cpu_seconds")));
        let copied = get("store_copy_share").or_else(|| get("copy_wait_share"));
        let mut cells = vec![("step", name)];
        cells.extend(StepPart::ALL.map(|part| (part.name(), time(part.name()))));
        cells.extend([
            ("whole", time("step")),
            ("tokens/s", format!("{:.0}", figure("tokens_per_second"))),
            ("GFLOP/s", format!("{:.1}", figure("flops_per_second") / 1e9)),
            ("of sgemm", format!("{:.1} %", 100.0 * figure("gemm_cpu_share"))),
            (copies, copied.map_or("–".to_owned(), |share| format!("{:.2} %", 100.0 * share))),
            ("peak", get("peak_resident_bytes").map_or("–".to_owned(), |peak| Bytes(peak as u64).to_string())),
        ]);
        cells.extend(get("idle").map(|idle| ("idle", format!("{:.1} %", 100.0 * idle))));
        cells
    };
    let of_step = |record: &StepRecord| {
        let figures = record.figures();
        let name = record.step.to_string() + if record.is_warm_up { " (warm-up)" } else { "" };
        row(name, &|key| figures.iter().find(|(name, _)| name == key).map(|(_, figure)| *figure))
    };
    let mut rows: Vec<_> = records.iter().map(of_step).collect();
    rows.push(row("median".to_owned(), &|key| summary.get(key).map(|spread| spread.median)));
    rows.push(row("least".to_owned(), &|key| summary.get(key).map(|spread| spread.min)));
    rows.push(row("most".to_owned(), &|key| summary.get(key).map(|spread| spread.max)));
    Table::of_named(rows)
}
