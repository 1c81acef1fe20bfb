//! The step that speed is measured with, in full and by kind of work: 8192 tokens through 4 layers of 256, LoRA on all projections.
//!
//! `cargo bench --bench step` prints, for two policies and two heights of cells, the CPU-seconds of a step by its parts, and where they
//! go: products of matrices, attention, the sums that a policy asks for, and the rest. What the kinds take is measured alone, with the
//! shapes and as often as the step needs them, in the same run and on one thread; the rest is what remains. The model is that of
//! `recipes/bench/step.toml`.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench that cannot go on fails")]

mod shapes;

use std::path::Path;
use std::rc::Rc;

use kvtune::dist::ProcessGroup;
use kvtune::measure::summarise;
use kvtune::model::ModelConfig;
use kvtune::plan::StepPart;
use kvtune::recipe::Recipe;
use kvtune::report::table::Table;
use kvtune::train::{Bench, BenchOptions};
use shapes::{Work, cpu_seconds};
use tch::{Device, Kind};

const TOKENS: usize = 8192;
const STEPS: usize = 3;
const CHUNK: i64 = 256;
const SLOTS: i64 = 1024;
const CASES: [(&str, usize, &str); 5] =
    [("h2o", 4, "f32"), ("h2o", 1, "f32"), ("lastrec", 4, "f32"), ("lastrec", 1, "f32"), ("h2o", 4, "bf16")];

fn main() {
    tch::set_num_threads(1);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/bench/step.toml");
    let config = ModelConfig::load_file(&path.with_file_name("config.json")).unwrap();
    println!(
        "\n{TOKENS} tokens, 4 layers of 256, LoRA r 8 on all projections, C = 1024, chunks of 256, one thread; CPU-seconds:"
    );
    let mut parts = Table::new(
        &[
            &["policy", "layers per cell", "dtype"],
            &StepPart::ALL.map(StepPart::name)[..],
            &["whole", "GFLOP/s", "of sgemm", "peak, MiB"],
        ]
        .concat(),
    );
    let mut kinds = Table::new(&["policy", "layers per cell", "dtype", "GEMM", "attention", "sums", "norms and rest", "whole"]);
    for (policy, layers, dtype) in CASES {
        let overrides = [
            format!("kv_cache.policy={policy}"),
            format!("grad.layers_per_cell={layers}"),
            format!("model.dtype={dtype}"),
            "grad.keep_graph=none".to_owned(),
        ];
        let recipe = Recipe::load(&path, &overrides).unwrap().recipe;
        let options = BenchOptions { tokens: vec![TOKENS], warm_up: 1, profiles_memory: false, draws_weights: true };
        let mut bench = Bench::new(recipe, Device::Cpu, options, &Rc::new(ProcessGroup::alone())).unwrap();
        let records: Vec<_> = (0..=STEPS).map(|_| bench.step().unwrap()).collect();
        let summary = summarise(&records).unwrap();
        let get = |key: &str| summary.get(key).map_or(0.0, |spread| spread.median);
        let of = |part: &str| format!("{:.2}", get(&format!("{part}_cpu_seconds")));
        let mut sequence = vec![policy.to_owned(), layers.to_string(), dtype.to_owned()];
        sequence.extend(StepPart::ALL.map(|part| of(part.name())));
        sequence.extend([of("step"), format!("{:.1}", get("flops_per_cpu_second") / 1e9)]);
        sequence.extend([
            format!("{:.0} %", 100.0 * get("gemm_cpu_share")),
            format!("{:.0}", get("peak_resident_bytes") / f64::from(1 << 20)),
        ]);
        add(&mut parts, &sequence);
        // All layer bands but the top one are run forward a second time.
        let forwards = 2.0 + (4 - layers) as f64 / 4.0;
        let kind = if dtype == "bf16" { Kind::BFloat16 } else { Kind::Float };
        let [gemm, attention, sums] = by_kind(&config, kind, forwards, policy == "h2o");
        let whole = get("step_cpu_seconds");
        let seconds = [gemm, attention, sums, whole - gemm - attention - sums, whole];
        let sequence = [policy.to_owned(), layers.to_string(), dtype.to_owned()].into_iter();
        add(&mut kinds, &sequence.chain(seconds.map(|s| format!("{s:.2} ({:.0} %)", 100.0 * s / whole))).collect::<Vec<_>>());
    }
    println!("{parts}\n\n{kinds}");
}

/// CPU-seconds of products, attention and sums of a step, each kind measured alone.
fn by_kind(config: &ModelConfig, kind: Kind, forwards: f64, sums: bool) -> [f64; 3] {
    let work = Work::new(config, (CHUNK, SLOTS), kind);
    let (layers, chunks) = (config.num_layers() as f64, (TOKENS as i64 / CHUNK) as f64);
    let gemm = layers * chunks * (forwards * cpu_seconds(|| work.linear_forward()) + cpu_seconds(|| work.linear_backward()));
    let head = chunks * cpu_seconds(|| work.head());
    // The chunks that fill the cache see 0, 256, 512 and 768 older slots, and all that come after them 768.
    let mut attention = 0.0;
    for past in (0..SLOTS).step_by(CHUNK as usize) {
        let times = if past + CHUNK == SLOTS { chunks - (past / CHUNK) as f64 } else { 1.0 };
        let attended = work.attention.forward(past);
        let forward = cpu_seconds(|| drop(work.attention.forward(past)));
        attention += times * layers * (forwards * forward + cpu_seconds(|| work.attention.backward(past, &attended)));
    }
    // The span that fills the cache is not scored.
    let (past, scored) = (SLOTS - CHUNK, chunks - (SLOTS / CHUNK) as f64);
    let attended = work.attention.forward(past);
    let sums = if sums { layers * scored * cpu_seconds(|| work.attention.sums(past, &attended)) } else { 0.0 };
    [gemm + head, attention, sums]
}

fn add(table: &mut Table, cells: &[String]) {
    table.row(&cells.iter().map(String::as_str).collect::<Vec<_>>());
}
