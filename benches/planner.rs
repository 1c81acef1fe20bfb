//! The planner against measured steps.
//!
//! `cargo bench --bench planner [-- --seed 1 --draws 20 --threads 1]` draws recipes from the seed (layers, widths, slots, chunks, tokens,
//! dtypes, cells, stores), makes a step of each in a process of its own, and prints planned and measured peaks. `-- --growth` makes the
//! step of `recipes/bench/step.toml` at 8, 16, 32, 64 and 128 thousand tokens instead, and prints what grows: time for each token, memory by
//! part, and bytes for each further token, planned and measured.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench that cannot go on fails")]

#[path = "../tests/plan/draws.rs"]
mod draws;

use std::path::Path;

use draws::{PROCESS, Sizes, bench, draws, line, measure, number, parts};
use kvtune::report::table::Table;

const SIZES: Sizes = Sizes {
    layers: &[2, 3, 4, 6, 8],
    hidden: &[128, 192, 256, 384, 512],
    slots: &[256, 512, 1024, 2048],
    chunks: &[64, 128, 256, 512],
    caches: &[2, 3, 5],
};
const MIB: f64 = (1 << 20) as f64;
const KVTUNE: &str = env!("CARGO_BIN_EXE_kvtune");

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let number = |name: &str, default: usize| {
        let at = arguments.iter().position(|argument| argument == name);
        at.and_then(|at| arguments.get(at + 1)).map_or(default, |value| value.parse().unwrap())
    };
    if arguments.iter().any(|argument| argument == "--growth") {
        return growth(number("--threads", 2), number("--steps", 3));
    }
    let (seed, count, threads) = (number("--seed", 1), number("--draws", 20), number("--threads", 1));
    let home = tempfile::tempdir().unwrap();
    let mut table =
        Table::new(&["recipe", "process, MiB", "planned", "error", "tensors, MiB", "planned", "error", "s", "planned"]);
    let (mut worst, mut worst_of_tensors) = (0.0f64, 0.0f64);
    for (i, draw) in draws(seed as u64, count, SIZES).iter().enumerate() {
        let peaks = measure(Path::new(KVTUNE), &home.path().join(i.to_string()), draw, threads);
        let (process, tensors) = peaks.errors();
        (worst, worst_of_tensors) = (worst.max(process.abs()), worst_of_tensors.max(tensors.abs()));
        let mib = |bytes: f64| format!("{:.1}", bytes / MIB);
        let cells = [
            draw.words.clone(),
            mib(peaks.process.1),
            mib(peaks.process.0),
            format!("{:+.1} %", 100.0 * process),
            mib(peaks.tensors.1),
            mib(peaks.tensors.0),
            format!("{:+.1} %", 100.0 * tensors),
            format!("{:.2}", peaks.seconds.1),
            format!("{:.2}", peaks.seconds.0),
        ];
        println!("{:2} {:+.1} % {:+.1} %  {}", i + 1, 100.0 * process, 100.0 * tensors, draw.words);
        table.row(&cells.iter().map(String::as_str).collect::<Vec<_>>());
    }
    println!("\nseed {seed}, {threads} threads\n{table}");
    println!("worst of the process {:.1} %, of its tensors {:.1} %", 100.0 * worst, 100.0 * worst_of_tensors);
}

/// Longer and longer sequences.
fn growth(threads: usize, steps: usize) {
    let mut table = Table::new(&[
        "tokens",
        "s a step",
        "CPU-ms a token",
        "peak, MiB",
        "planned",
        "in stores and logs",
        "activations",
        "other tensors",
        "not in tensors",
    ]);
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/bench/step.toml");
    let mut before: Option<(f64, [f64; 2])> = None;
    for tokens in [8192, 16384, 32768, 65536, 131_072] {
        let lines = bench(Path::new(KVTUNE), &recipe, [tokens, threads, steps], &["--set", "grad.keep_graph=none"]);
        let (memory, forecast, summary) = (line(&lines, "memory"), line(&lines, "forecast"), line(&lines, "summary"));
        let parts = parts(memory);
        let sum =
            |names: &[&str]| parts.iter().filter(|(name, _)| names.contains(&name.as_str())).map(|(_, bytes)| bytes).sum::<f64>();
        let waits = sum(&["undo log", "layer checkpoints"]);
        let (activations, process) = (sum(&["activations"]), sum(&PROCESS));
        let measured = number(&memory["measured_peak_bytes"]);
        let planned = number(&forecast["process_bytes"]);
        let cpu = number(&summary["step_cpu_seconds"]["median"]);
        let cells = [
            tokens.to_string(),
            format!("{:.2}", number(&summary["step_seconds"]["median"])),
            format!("{:.3}", 1000.0 * cpu / tokens as f64),
            format!("{:.1}", measured / MIB),
            format!("{:.1}", planned / MIB),
            format!("{:.1}", waits / MIB),
            format!("{:.1}", activations / MIB),
            format!("{:.1}", (measured - waits - activations - process) / MIB),
            format!("{:.1}", process / MIB),
        ];
        table.row(&cells.iter().map(String::as_str).collect::<Vec<_>>());
        if let Some((fewer, [planned_before, measured_before])) = before {
            let each = |now: f64, before: f64| (now - before) / (tokens as f64 - fewer);
            let (planned, measured) = (each(planned, planned_before), each(measured, measured_before));
            println!(
                "{fewer} to {tokens} tokens: {planned:.0} bytes a token planned, {measured:.0} measured ({:+.1} %)",
                100.0 * (planned / measured - 1.0)
            );
        }
        before = Some((tokens as f64, [planned, measured]));
    }
    println!("\n{threads} threads, median of {steps}\n{table}");
}
