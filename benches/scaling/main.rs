//! One sequence across GPUs, simulated: layers as a pipeline whose micro-batches are the chunks, beside ring attention and data parallelism.
//!
//! `cargo bench --bench scaling` prints the tables of `docs/guides/scaling.md`, which says what is modelled, and
//! `cargo bench --bench scaling -- --picture docs/figures/scaling.svg` draws its picture. Work and memory are the planner's
//! (`kvtune::plan`), the order of each device's tasks is the engine's (`kvtune::engine::Schedule`), and the speed of the machines is assumed
//! (`machine.rs`). Nothing is measured, and no GPU is needed.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a bench that cannot go on fails")]

mod machine;
mod pipeline;
mod ring;
mod simulator;
mod work;

use std::ops::Range;
use std::path::{Path, PathBuf};

use kvtune::inspect::{ColourMap, ColourRow, ColourScale, MAX_CELLS, Rgb};
use kvtune::report::table::Table;
use machine::{CLUSTERS, Cluster, Gpu, H200, MEMORY, assumptions};
use pipeline::{Stage, cut, tasks};
use ring::Ring;
use simulator::{Pass, run};
use work::{ColumnWork, Memory, Subject};

const MODELS: [&str; 2] = ["qwen2.5-7b", "qwen3-4b"];
const K: usize = 1024;
const LENGTHS: [usize; 4] = [128 * K, 512 * K, 2048 * K, 8192 * K];
const GPUS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const GB: f64 = 1e9;

fn main() {
    if let Some(at) = std::env::args().position(|argument| argument == "--picture") {
        let file = std::env::args().nth(at + 1).unwrap();
        return std::fs::write(file, picture(MODELS[0]).to_svg("scaling")).unwrap();
    }
    let mut table = Table::of_words(&["what", "assumed", "source"]);
    for row in assumptions() {
        table.row(&row.each_ref().map(String::as_str));
    }
    println!("{table}");
    for model in MODELS {
        by_length(model);
        by_method(model);
    }
    by_link(MODELS[0]);
    by_speed(MODELS[0]);
    by_tiling(MODELS[0]);
}

/// A step of 128k tokens over 8 GPUs as a picture: which pass each GPU is in, moment by moment.
fn picture(model: &str) -> ColourMap {
    const COLOURS: [(Pass, Rgb, &str); 4] = [
        (Pass::Forward, [9, 105, 218], "forward phase"),
        (Pass::Recompute, [154, 103, 0], "recomputing a cell"),
        (Pass::Backward, [188, 76, 0], "its backward"),
        (Pass::Head, [130, 80, 223], "head; white is waiting"),
    ];
    let Prepared { subject, columns } = Prepared::new(model, &[], 128 * K);
    let stages = cut(&subject, &columns, 8, &H200);
    let tasks = tasks(&subject, &columns, &stages, &H200);
    let timeline = run(stages.len(), &tasks, &|from, to| CLUSTERS[0].link(from, to));
    let moment = timeline.seconds() / MAX_CELLS as f64;
    let row = |(device, stage): (usize, &Stage)| {
        let mut cells = vec![None; MAX_CELLS];
        for (task, span) in tasks.iter().zip(&timeline.spans).filter(|(task, _)| task.device == device) {
            let colour = COLOURS.iter().find(|(pass, ..)| *pass == task.pass).map(|(_, colour, _)| *colour);
            let [begins, ends] = [span.0, span.1].map(|at| ((at / moment).round() as usize).min(MAX_CELLS));
            cells[begins..ends].fill(colour);
        }
        let Range { start, end } = stage.layers;
        ColourRow { group: format!("GPU {device}, layers {start} to {}", end - 1), name: String::new(), cells }
    };
    ColourMap {
        title: format!("{model}, 128k tokens over 8 GPUs: {:.1} s, simulated", timeline.seconds()),
        notes: vec![format!("{} chunks; NVLink; idle share {}", columns.len(), percent(timeline.idle()))],
        x: ("milliseconds".to_owned(), (1e3 * timeline.seconds()) as usize),
        rows: stages.iter().enumerate().rev().map(row).collect(),
        scales: COLOURS.map(|(_, colour, words)| ColourScale { colours: vec![colour], words: words.to_owned() }).to_vec(),
    }
}

fn recipe(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/bench").join(format!("{model}.toml"))
}

/// A step over several GPUs.
struct Step {
    gpus: usize,
    seconds: f64,
    idle: f64,
    bytes: f64,
    memory: Memory,
}

/// A sequence with the work of its columns.
struct Prepared {
    subject: Subject,
    columns: Vec<ColumnWork>,
}

impl Prepared {
    fn new(model: &str, words: &[String], tokens: usize) -> Self {
        let own = ["train.micro_batch_size=1".to_owned()];
        let subject = Subject::load(&recipe(model), &[&own, words].concat(), tokens);
        Self { columns: subject.columns(), subject }
    }

    /// With a cache as long as the sequence.
    fn full(model: &str, tokens: usize, chunk: usize) -> Self {
        Self::new(
            model,
            &["kv_cache.policy=dense".into(), format!("kv_cache.cache_length={tokens}"), format!("kv_cache.chunk_size={chunk}")],
            tokens,
        )
    }

    fn pipeline(&self, gpus: usize, cluster: &Cluster) -> Step {
        self.pipeline_of(gpus, (&H200, cluster))
    }

    fn pipeline_of(&self, gpus: usize, (gpu, cluster): (&Gpu, &Cluster)) -> Step {
        let stages = cut(&self.subject, &self.columns, gpus, gpu);
        let tasks = tasks(&self.subject, &self.columns, &stages, gpu);
        let timeline = run(stages.len(), &tasks, &|from, to| cluster.link(from, to));
        // The longest of the lower, the lowest and the highest take most.
        let middle = stages[1..stages.len().max(2) - 1].iter().max_by_key(|stage| stage.layers.len());
        let memory =
            stages.first().into_iter().chain(middle).chain(stages.last()).map(|stage| self.subject.memory(&stage.layers));
        let memory = memory.fold(Memory::default(), |most, memory| Memory {
            device: most.device.max(memory.device),
            host: most.host.max(memory.host),
        });
        Step { gpus: stages.len(), seconds: timeline.seconds(), idle: timeline.idle(), bytes: timeline.bytes(), memory }
    }
}

fn seconds(seconds: f64) -> String {
    if seconds < 99.5 { format!("{seconds:.1} s") } else { format!("{seconds:.0} s") }
}

fn length(tokens: usize) -> String {
    if tokens < K * K { format!("{}k", tokens / K) } else { format!("{}M", tokens / K / K) }
}

fn number_of(gpus: usize, used: usize) -> String {
    if used == gpus { gpus.to_string() } else { format!("{used} of {gpus}") }
}

fn percent(part: f64) -> String {
    format!("{:.0} %", 100.0 * part)
}

/// The pipeline over `NVLink`: time, speed-up and idle share; then memory and bytes.
fn by_length(model: &str) {
    let names = LENGTHS.map(length);
    let header: Vec<&str> = std::iter::once("GPUs").chain(names.iter().map(String::as_str)).collect();
    let (mut times, mut memory) = (Table::new(&header), Table::new(&header));
    let prepared = LENGTHS.map(|tokens| Prepared::new(model, &[], tokens));
    let steps = GPUS.map(|gpus| prepared.each_ref().map(|prepared| prepared.pipeline(gpus, &CLUSTERS[0])));
    for (gpus, row) in GPUS.iter().zip(&steps) {
        let name = number_of(*gpus, row[0].gpus);
        let of_time = |(at, step): (usize, &Step)| {
            let gain = steps[0][at].seconds / step.seconds;
            format!("{}, {gain:.1}×, {}", seconds(step.seconds), percent(step.idle))
        };
        let of_memory =
            |step: &Step| format!("{:.0} + {:.0}, {:.1}", step.memory.device / GB, step.memory.host / GB, step.bytes / GB);
        let of_time: Vec<String> = row.iter().enumerate().map(of_time).collect();
        let of_memory: Vec<String> = row.iter().map(of_memory).collect();
        for (table, cells) in [(&mut times, of_time), (&mut memory, of_memory)] {
            table.row(&std::iter::once(name.as_str()).chain(cells.iter().map(String::as_str)).collect::<Vec<_>>());
        }
    }
    println!("\n{model}, pipeline over NVLink: time of a step, times as fast as one GPU, idle share\n{times}");
    println!("\nThe same: GB on the fullest GPU + GB on the host for it, GB sent by all\n{memory}");
}

/// The ways to use the same GPUs.
fn by_method(model: &str) {
    let mut table =
        Table::new(&["tokens", "GPUs", "data parallel", "pipeline", "pipeline, full attention", "ring attention", "GB sent"]);
    let with_memory = |time: f64, bytes: f64| {
        let too_much = if bytes > MEMORY[0] { format!(" ({:.0} GB)", bytes / GB) } else { String::new() };
        seconds(time) + &too_much
    };
    for tokens in [128 * K, 1024 * K, 8192 * K] {
        let (cached, full) = (Prepared::new(model, &[], tokens), Prepared::full(model, tokens, 4 * K));
        let whole = Prepared::full(model, tokens, tokens).subject;
        let alone = cached.pipeline(1, &CLUSTERS[0]).seconds;
        let trained = whole.step(whole.config.num_layers(), &whole.recipe.grad, |spec| spec.trained_bytes().0) as f64;
        for gpus in [8, 32, 64] {
            let [cached, full] = [&cached, &full].map(|prepared| prepared.pipeline(gpus, &CLUSTERS[0]));
            let ring = Ring::of(&whole, gpus, (&H200, &CLUSTERS[0]));
            let cells = [
                length(tokens),
                gpus.to_string(),
                seconds((alone + reduction(gpus, trained, &CLUSTERS[0])) / gpus as f64),
                with_memory(cached.seconds, cached.memory.device),
                with_memory(full.seconds, full.memory.device),
                with_memory(ring.seconds, ring.memory),
                format!("{:.0}, {:.0}, {:.0}", cached.bytes / GB, full.bytes / GB, ring.bytes / GB),
            ];
            table.row(&cells.each_ref().map(String::as_str));
        }
    }
    println!(
        "\n{model} over NVLink: time for one sequence, GB on a GPU where it is too much; GB sent by pipeline, pipeline, ring\n{table}"
    );
}

/// Seconds of a sum over all GPUs in a ring.
fn reduction(gpus: usize, bytes: f64, cluster: &Cluster) -> f64 {
    let link = cluster.link(0, gpus - 1);
    let turns = 2.0 * (gpus - 1) as f64;
    turns * (bytes / gpus as f64 / link.bytes_per_second + link.latency)
}

/// What links cost.
fn by_link(model: &str) {
    let mut table = Table::new(&["tokens", "GPUs", "link", "pipeline", "idle", "ring attention", "idle"]);
    for tokens in [128 * K, 1024 * K] {
        let (cached, whole) = (Prepared::new(model, &[], tokens), Prepared::full(model, tokens, tokens));
        for gpus in [4, 16] {
            for cluster in &CLUSTERS {
                let (step, ring) = (cached.pipeline(gpus, cluster), Ring::of(&whole.subject, gpus, (&H200, cluster)));
                let cells = [
                    length(tokens),
                    gpus.to_string(),
                    cluster.name.to_owned(),
                    seconds(step.seconds),
                    percent(step.idle),
                    seconds(ring.seconds),
                    percent(ring.idle),
                ];
                table.row(&cells.each_ref().map(String::as_str));
            }
        }
    }
    println!("\n{model} by link\n{table}");
}

/// What the assumed speeds decide.
fn by_speed(model: &str) {
    let slow = Gpu { attention: 0.7 * H200.attention, attention_backward: 0.7 * H200.attention_backward, ..H200 };
    let fast = Gpu { attention: 1.5 * H200.attention, attention_backward: 1.5 * H200.attention_backward, ..H200 };
    let all = Gpu { linear: 1.5 * H200.linear, ..fast };
    let speeds = [("as assumed", H200), ("attention × 0.7", slow), ("attention × 1.5", fast), ("all × 1.5", all)];
    let mut table = Table::new(&["1M tokens, 16 GPUs", "100 Gbit/s: pipeline", "idle", "ring attention", "idle"]);
    let (cached, whole) = (Prepared::new(model, &[], K * K), Prepared::full(model, K * K, K * K));
    for (name, gpu) in speeds {
        let at = (&gpu, &CLUSTERS[2]);
        let (step, ring) = (cached.pipeline_of(16, at), Ring::of(&whole.subject, 16, at));
        let cells = [name.to_owned(), seconds(step.seconds), percent(step.idle), seconds(ring.seconds), percent(ring.idle)];
        table.row(&cells.each_ref().map(String::as_str));
    }
    println!("\n{model} by speed\n{table}");
}

/// What chunks, layer bands and kept graphs do.
fn by_tiling(model: &str) {
    let cases: [(&str, &[&str]); 8] = [
        ("as the recipe has it", &[]),
        ("chunks of 1024", &["kv_cache.chunk_size=1024"]),
        ("chunks of 2048", &["kv_cache.chunk_size=2048"]),
        ("chunks of 8192", &["kv_cache.chunk_size=8192"]),
        ("columns of 2 chunks", &["grad.chunks_per_cell=2"]),
        ("bands of one layer", &["grad.layers_per_cell=1"]),
        ("8 graphs kept", &["grad.keep_graph=8"]),
        ("40 graphs kept", &["grad.keep_graph=40"]),
    ];
    let mut table = Table::new(&["256k tokens", "1 GPU", "8 GPUs", "faster", "idle", "GB on a GPU", "GB on the host"]);
    for (name, words) in cases {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let prepared = Prepared::new(model, &words, 256 * K);
        let [one, eight] = [1, 8].map(|gpus| prepared.pipeline(gpus, &CLUSTERS[0]));
        let cells = [
            name.to_owned(),
            seconds(one.seconds),
            seconds(eight.seconds),
            format!("{:.1}×", one.seconds / eight.seconds),
            percent(eight.idle),
            format!("{:.0}", eight.memory.device / GB),
            format!("{:.0}", eight.memory.host / GB),
        ];
        table.row(&cells.each_ref().map(String::as_str));
    }
    println!("\n{model} over NVLink, by tiling\n{table}");
}
