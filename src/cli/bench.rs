//! `kvtune bench`: training steps on random tokens, timed part by part.

use std::rc::Rc;

use clap::Args;
use serde_json::json;
use tch::Device;

use super::counts::{any_number, at_least_one};
use super::plan::json::alternative;
use super::recipe_file::RecipeFile;
use super::world::Joining;
use crate::bench::{Bench, BenchSummary, Size, StepRecord, summarise};
use crate::dist::ProcessGroup;
use crate::native::cuda::why_not_pinned;
use crate::native::{Syncs, libtorch_version};
use crate::plan::{Spent, StepPart};
use crate::report::console;
use crate::report::memory::{not_pinned, planned_and_measured};
use crate::report::table::Table;
use crate::units::{Bytes, Fault, Seconds, counted};

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
    /// Steps before those, which are shown and not counted.
    #[arg(long, value_name = "W", default_value_t = 1, value_parser = any_number())]
    warmup: usize,
    /// Draw the weights, on the device: of the model's directory only `config.json` is read.
    #[arg(long)]
    random_weights: bool,
    /// Tell the memory of the last step by part.
    #[arg(long)]
    profile_memory: bool,
    /// Count what makes the host wait for the device, in the last step and part by part; steps take longer for it.
    #[arg(long)]
    count_syncs: bool,
    #[command(flatten)]
    pub(super) joining: Joining,
}

impl BenchSteps {
    pub(super) fn run(&self, device: Device, world: &Rc<ProcessGroup>) -> Result<(), Fault> {
        let recipe = self.recipe.load(device)?;
        let size = Size {
            tokens: self.tokens.clone(),
            warm_up: self.warmup,
            profiles_memory: self.profile_memory,
            counts_waits: self.count_syncs,
        };
        let mut bench = Bench::new(recipe, device, size, self.random_weights, world)?;
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
            console::result(&alternative("forecast", bench.planned()).to_string())?;
            if let Some(waits) = last.waits_to_json() {
                console::result(&waits.to_string())?;
            }
            return last.memory.iter().try_for_each(|profile| console::result(&profile.to_json().to_string()));
        }
        console::table(&table(&records, &summary))?;
        if let Some(waits) = &last.waits {
            console::result(&format!("\nwhat made the host wait in the last step\n{}", waits_table(waits)))?;
        }
        for profile in &last.memory {
            console::result(&format!("\n{profile}"))?;
        }
        if let Some(peak) = last.peak {
            console::result(&format!("\n{}", planned_and_measured(bench.planned().host, peak.resident)))?;
        }
        Ok(())
    }

    /// What is about to be run, and on what.
    fn introduce(&self, bench: &Bench, world: &ProcessGroup) -> Result<(), Fault> {
        let (config, device, threads) = (bench.model().config(), bench.model().device(), tch::get_num_threads());
        let device = if let Device::Cuda(index) = device { format!("cuda:{index}") } else { "cpu".to_owned() };
        let (dtype, libtorch, attention) = (bench.dtype(), libtorch_version(), bench.attention());
        let trained = bench.model().parameters().iter().map(|(_, leaf)| leaf.numel()).sum::<usize>();
        if console::speech().is_json {
            let line = json!({
                "kind": "setup", "version": env!("CARGO_PKG_VERSION"), "libtorch": libtorch, "device": device,
                "ranks": world.size(), "threads": threads, "dtype": dtype.to_string(), "sequences": bench.sequences(), "tokens_per_sequence": self.tokens,
                "parameters": config.num_parameters(), "trained_parameters": trained,
                "attention": attention,
            });
            return console::result(&line.to_string());
        }
        let ranks = if world.size() > 1 { format!("each of {} ranks: ", world.size()) } else { String::new() };
        let line = format!(
            "{ranks}{} of {} tokens; {} weights in {dtype}, {trained} trained; {device}, {threads} threads, libtorch {libtorch}; attention: \
             {attention}",
            counted(bench.sequences(), "sequence"),
            self.tokens.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
            config.num_parameters(),
        );
        console::result(&line)
    }
}

fn table(records: &[StepRecord], summary: &BenchSummary) -> Table {
    let mut header = vec!["step"];
    header.extend(StepPart::ALL.map(StepPart::name));
    let copies = records.first().map_or("copies", |record| record.copies.names().0);
    header.extend(["whole", "tokens/s", "GFLOP/s", "of sgemm", copies, "peak"]);
    header.extend(summary.get("idle").map(|_| "idle"));
    let mut table = Table::new(&header);
    for record in records {
        let mut cells = vec![record.step.to_string() + if record.is_warm_up { " (warm-up)" } else { "" }];
        let time = |spent: Spent| format!("{:.3} / {:.3}", spent.seconds, spent.cpu_seconds);
        cells.extend(record.parts.map(time));
        cells.push(time(record.whole));
        cells.push(format!("{:.0}", record.tokens_per_second()));
        cells.push(format!("{:.1}", record.rate().per_second / 1e9));
        cells.push(format!("{:.1} %", 100.0 * record.gemm_share().1));
        cells.push(format!("{:.2} %", 100.0 * record.copy_share()));
        cells.push(record.peak.map_or("–".to_owned(), |peak| peak.resident.to_string()));
        cells.extend(record.idle.map(|idle| format!("{:.1} %", 100.0 * idle)));
        add(&mut table, &cells);
    }
    for (name, of) in [("median", 0), ("least", 1), ("most", 2)] {
        add(&mut table, &summary_row(name, summary, of));
    }
    table
}

/// A row of the summary: the median, the least, or the most of each figure.
fn summary_row(name: &str, summary: &BenchSummary, which: usize) -> Vec<String> {
    let get = |key: &str| summary.get(key).map_or(f64::NAN, |spread| [spread.median, spread.min, spread.max][which]);
    let time = |part: &str| format!("{:.3} / {:.3}", get(&format!("{part}_seconds")), get(&format!("{part}_cpu_seconds")));
    let mut cells = vec![name.to_owned()];
    cells.extend(StepPart::ALL.map(|part| time(part.name())));
    cells.push(time("step"));
    cells.push(format!("{:.0}", get("tokens_per_second")));
    cells.push(format!("{:.1}", get("flops_per_second") / 1e9));
    cells.push(format!("{:.1} %", 100.0 * get("gemm_cpu_share")));
    let share = ["store_copy_share", "copy_wait_share"].into_iter().find_map(|key| summary.get(key).map(|_| get(key)));
    cells.push(share.map_or("–".to_owned(), |share| format!("{:.2} %", 100.0 * share)));
    let peak = summary.get("peak_resident_bytes");
    cells.push(peak.map_or("–".to_owned(), |_| Bytes(get("peak_resident_bytes") as u64).to_string()));
    cells.extend(summary.get("idle").map(|_| format!("{:.1} %", 100.0 * get("idle"))));
    cells
}

/// Parts by kinds of waits.
fn waits_table(waits: &[Syncs; 6]) -> Table {
    let mut header = vec!["part"];
    header.extend(Syncs::KINDS);
    let mut table = Table::new(&header);
    for (part, waits) in StepPart::ALL.into_iter().zip(waits) {
        let counts = waits.rows().map(|(_, count)| count.to_string());
        add(&mut table, &std::iter::once(part.name().to_owned()).chain(counts).collect::<Vec<_>>());
    }
    table
}

fn add(table: &mut Table, cells: &[String]) {
    table.row(&cells.iter().map(String::as_str).collect::<Vec<_>>());
}
