//! What threads are worth, alone on the machine and beside others: steps by the wall, on one thread and on two.
//!
//! `cargo bench --bench threads [-- --threads 2 --rounds 3]` runs each step alone, beside one busy process for each thread, and beside
//! one niced process, with the default for how long a thread looks out for work before it sleeps, and with other ones. Every figure is a
//! ratio to the same step on one thread alone, measured in the same round; the table has the medians of the rounds.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench that cannot go on fails")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use kvtune::report::table::Table;
use serde_json::{Value, json};

const KVTUNE: &str = env!("CARGO_BIN_EXE_kvtune");
/// What is asked of libgomp: nothing, so that kvtune's own choice holds, or a number of turns. Its own default is 300 000.
const SPINS: [Option<&str>; 5] = [None, Some("0"), Some("1000"), Some("10000"), Some("300000")];

/// A step by its name: recipe, tokens, steps.
struct AttendShape {
    name: &'static str,
    recipe: PathBuf,
    tokens: usize,
    steps: usize,
}

/// Processes that compute until they are dropped.
struct Busy(Vec<Child>);

impl Busy {
    fn new(count: usize, nice: u8) -> Self {
        let one = |_| {
            let mut command = Command::new("nice");
            command.args(["-n", &nice.to_string(), "sh", "-c", "while :; do :; done"]).stdin(Stdio::null());
            command.spawn().unwrap()
        };
        Self((0..count).map(one).collect())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = (child.kill(), child.wait());
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let number = |name: &str, default: usize| {
        let at = arguments.iter().position(|argument| argument == name);
        at.and_then(|at| arguments.get(at + 1)).map_or(default, |value| value.parse().unwrap())
    };
    let (threads, rounds) = (number("--threads", 2), number("--rounds", 3));
    let home = tempfile::tempdir().unwrap();
    let shapes = shapes(home.path());
    let mut table = Table::new(&["step", "beside", "kvtune", "0 turns", "1000", "10 000", "300 000"]);
    for shape in &shapes {
        for (beside, count, nice) in [("nothing", 0, 0), ("a busy process per thread", threads, 0), ("one niced process", 1, 19)]
        {
            let mut found = [const { Vec::new() }; SPINS.len()];
            for _ in 0..rounds {
                let alone = seconds(shape, 1, None);
                let _busy = Busy::new(count, nice);
                for (spins, found) in SPINS.iter().zip(&mut found) {
                    found.push(seconds(shape, threads, *spins) / alone);
                }
            }
            let medians: Vec<String> = found.into_iter().map(|ratios| format!("{:.2}", median(ratios))).collect();
            println!("{}, beside {beside}: {}", shape.name, medians.join(" "));
            table.row(&[&[shape.name, beside], &medians.iter().map(String::as_str).collect::<Vec<_>>()[..]].concat());
        }
    }
    println!("\n{threads} threads, seconds by the wall as a part of those of one thread alone; medians of {rounds}\n{table}");
}

/// A model of 171 840 weights, the step that speed is measured with, and layers of the width of a model of half a billion weights.
fn shapes(home: &Path) -> [AttendShape; 3] {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let wide = json!({
        "model_type": "qwen2", "vocab_size": 8192, "hidden_size": 896, "num_hidden_layers": 2, "intermediate_size": 4864,
        "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768, "tie_word_embeddings": true,
    });
    std::fs::write(home.join("config.json"), wide.to_string()).unwrap();
    let recipe = |name: &str, model: &Path, slots: usize, chunk: usize| {
        let path = home.join(name);
        let text = format!(
            "model.path = '{}'\nlora.r = 8\ndata = {{ format = 'tokens', train = 'none' }}\n\
             kv_cache = {{ policy = 'h2o', cache_length = {slots}, chunk_size = {chunk} }}\n",
            model.display()
        );
        std::fs::write(&path, text).unwrap();
        path
    };
    let small = recipe("small.toml", &root.join("tests/fixtures/model-qwen2"), 128, 32);
    let wide = recipe("wide.toml", home, 256, 128);
    let step = root.join("recipes/bench/step.toml");
    [
        AttendShape { name: "3 × 64, 569 tokens", recipe: small, tokens: 569, steps: 31 },
        AttendShape { name: "4 × 256, 2048 tokens", recipe: step, tokens: 2048, steps: 2 },
        AttendShape { name: "2 × 896, 512 tokens", recipe: wide, tokens: 512, steps: 1 },
    ]
}

/// Seconds of a step: the median of the run's.
fn seconds(shape: &AttendShape, threads: usize, spins: Option<&str>) -> f64 {
    let mut command = Command::new(KVTUNE);
    command.args(["bench", "--device", "cpu", "--random-weights", "--format", "json", "--recipe"]).arg(&shape.recipe);
    let numbers = [shape.tokens, shape.steps, threads].map(|number| number.to_string());
    command.args(["--tokens", &numbers[0], "--steps", &numbers[1], "--threads", &numbers[2]]);
    command.env_remove("GOMP_SPINCOUNT").env_remove("OMP_WAIT_POLICY").envs(spins.map(|spins| ("GOMP_SPINCOUNT", spins)));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let out = String::from_utf8(output.stdout).unwrap();
    let lines = out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.into_iter().find(|line| line["kind"] == "summary").unwrap()["step_seconds"]["median"].as_f64().unwrap()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
