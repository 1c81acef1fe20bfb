//! Recipes drawn from a seed, and what planner and process say of them.

use std::fs;
use std::path::Path;
use std::process::Command;

use rand::prelude::IndexedRandom;
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

/// A recipe, its model's `config.json`, and how many tokens its sequences have.
#[derive(Debug)]
pub(crate) struct Draw {
    pub(crate) config: Value,
    pub(crate) recipe: String,
    pub(crate) tokens: usize,
    /// What was drawn, in a few words.
    pub(crate) words: String,
}

/// How large what is drawn may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) layers: &'static [usize],
    pub(crate) hidden: &'static [usize],
    pub(crate) slots: &'static [usize],
    pub(crate) chunks: &'static [usize],
    /// The sequence, in caches.
    pub(crate) caches: &'static [usize],
}

/// Draws `count` recipes.
pub(crate) fn draws(seed: u64, count: usize, sizes: Sizes) -> Vec<Draw> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    // A stream of its own: the other figures of a seed stay what they were.
    let stream = |number: u64| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(number);
        rng
    };
    let (mut of_dropout, mut of_graphs, mut of_outputs) = (stream(1), stream(2), stream(3));
    let mut kept = || *["'none'", "'none'", "1", "3", "8", "'auto'"].choose(&mut of_graphs).unwrap();
    let mut outputs = || *["recompute", "keep"].choose(&mut of_outputs).unwrap();
    let mut dropout = || *["0.0", "0.0", "0.1"].choose(&mut of_dropout).unwrap();
    (0..count).map(|_| draw(&mut rng, sizes, [dropout(), kept(), outputs()])).collect()
}

fn draw(rng: &mut ChaCha8Rng, sizes: Sizes, [dropout, kept, outputs]: [&'static str; 3]) -> Draw {
    let mut of = |choices: &[usize]| *choices.choose(rng).unwrap();
    let (layers, hidden, slots) = (of(sizes.layers), of(sizes.hidden), of(sizes.slots));
    let (head_dim, groups, per_group) = (of(&[16, 32, 64]), of(&[1, 2, 4]), of(&[1, 2, 4]));
    let (vocab, inner, sequences, r) = (of(&[1000, 2048, 8192]), hidden * of(&[2, 3, 4]), of(&[1, 1, 2]), of(&[4, 8, 16]));
    let fitting: Vec<usize> = sizes.chunks.iter().copied().filter(|&chunk| chunk <= slots / 2).collect();
    let chunk = of(&fitting);
    let tokens = of(sizes.caches) * slots + of(&[0, 1, chunk / 2, chunk - 1]);
    let (layers_per_cell, chunks_per_cell) = (of(&[1, 2, layers]), of(&[0, 1, 2, 4]));
    let is_full = of(&[0, 0, 0, 0, 0, 0, 0, 1]) == 1;
    let mut word = |choices: &[&'static str]| *choices.choose(rng).unwrap();
    let dtype = if is_full { "f32" } else { word(&["f32", "f32", "bf16", "f64"]) };
    let policy = word(&["h2o", "lastrec", "keydiff", "snapkv", "streaming-llm", "expected-attention"]);
    let buffer = word(&["plain", "plain", "plain", "int8"]);
    let undo = if buffer == "plain" { word(&["plain", "plain", "int8"]) } else { "plain" };
    let checkpoints = word(&["plain", "plain", "int8", "int4"]);
    // Beside stores that round no output is kept.
    let outputs = if [checkpoints, undo] == ["plain"; 2] { outputs } else { "recompute" };
    let (checkpoints_place, undo_place) = (word(&["memory", "memory", "file"]), word(&["memory", "memory", "file"]));
    let tied = rng.random::<bool>();
    let trained = if is_full { "train.weights = 'all'".to_owned() } else { format!("lora = {{ r = {r}, dropout = {dropout} }}") };
    let width = if chunks_per_cell == 0 { String::new() } else { format!("chunks_per_cell = {chunks_per_cell}, ") };
    Draw {
        config: json!({
            "model_type": "qwen2", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": groups * per_group,
            "num_key_value_heads": groups, "head_dim": head_dim, "intermediate_size": inner, "vocab_size": vocab,
            "max_position_embeddings": 1 << 20, "tie_word_embeddings": tied,
        }),
        recipe: format!(
            "model = {{ path = '.', dtype = '{dtype}' }}\n{trained}\ntrain.micro_batch_size = {sequences}\n\
             data = {{ format = 'tokens', train = 'none' }}\n\
             kv_cache = {{ policy = '{policy}', cache_length = {slots}, chunk_size = {chunk}, buffer = '{buffer}' }}\n\
             grad = {{ layers_per_cell = {layers_per_cell}, {width}layer_checkpoints = '{checkpoints}', undo_log = '{undo}', \
             layer_checkpoints_place = '{checkpoints_place}', undo_log_place = '{undo_place}', keep_graph = {kept}, attention_outputs = '{outputs}', scratch_dir = 'scratch' }}\n"
        ),
        tokens,
        words: format!(
            "{layers} × {hidden}, MLP {inner}, {groups}·{per_group} heads of {head_dim}, vocabulary {vocab}, {dtype}{}; {policy} {slots} \
             {buffer}, chunks {chunk}; {sequences} × {tokens}; cells {layers_per_cell} × {}; {checkpoints} {checkpoints_place}, {undo} {undo_place}; {kept} kept, {outputs}",
            if is_full { " full".to_owned() } else { format!(", dropout {dropout}") },
            if chunks_per_cell == 0 { "cache".to_owned() } else { chunks_per_cell.to_string() },
        ),
    }
}

/// Peaks of a step, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peaks {
    /// Of the process: planned, and measured.
    pub(crate) process: (f64, f64),
    /// Of its tensors alone.
    pub(crate) tensors: (f64, f64),
    /// Seconds of the step: estimated, and measured.
    pub(crate) seconds: (f64, f64),
}

impl Peaks {
    /// How far the plans are from what was measured: of the process, and of its tensors.
    pub(crate) fn errors(&self) -> (f64, f64) {
        let error = |(planned, measured): (f64, f64)| planned / measured - 1.0;
        (error(self.process), error(self.tensors))
    }
}

/// Rows of a memory profile that are no tensors.
pub(crate) const PROCESS: [&str; 1] = ["process"];

/// A step in a process of its own, by the binary at `kvtune`, in `dir`.
pub(crate) fn measure(kvtune: &Path, dir: &Path, draw: &Draw, threads: usize) -> Peaks {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("config.json"), draw.config.to_string()).unwrap();
    let recipe = dir.join("recipe.toml");
    fs::write(&recipe, &draw.recipe).unwrap();
    let lines = bench(kvtune, &recipe, [draw.tokens, threads, 1], &[]);
    let (forecast, memory, summary) = (line(&lines, "forecast"), line(&lines, "memory"), line(&lines, "summary"));
    let parts = parts(memory);
    let tensors = parts.iter().filter(|(name, _)| !PROCESS.contains(&name.as_str())).map(|(_, bytes)| bytes).sum();
    Peaks {
        process: (number(&forecast["process_bytes"]), number(&memory["measured_peak_bytes"])),
        tensors: (number(&forecast["tensors"]["tensor_bytes"]), tensors),
        seconds: (
            forecast["seconds"].as_object().unwrap().values().map(number).sum(),
            number(&summary["step_seconds"]["median"]),
        ),
    }
}

/// The lines of `kvtune bench` with its memory by part: for so many tokens, threads and steps, and with further arguments.
pub(crate) fn bench(kvtune: &Path, recipe: &Path, numbers: [usize; 3], more: &[&str]) -> Vec<Value> {
    let words = ["bench", "--device", "cpu", "--random-weights", "--profile-memory", "--format", "json", "--recipe"];
    let [tokens, threads, steps] = numbers.map(|number| number.to_string());
    let numbers = ["--tokens", &tokens, "--threads", &threads, "--steps", &steps];
    let output = Command::new(kvtune).args(words).arg(recipe).args(numbers).args(more).output().unwrap();
    assert!(output.status.success(), "{}: {}", recipe.display(), String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The first line of a kind.
pub(crate) fn line<'a>(lines: &'a [Value], kind: &str) -> &'a Value {
    lines.iter().find(|line| line["kind"] == kind).unwrap()
}

pub(crate) fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

/// Parts and bytes of a memory profile.
pub(crate) fn parts(memory: &Value) -> Vec<(String, f64)> {
    let parts = memory["parts"].as_array().unwrap().iter();
    parts.map(|part| (part["part"].as_str().unwrap().to_owned(), number(&part["bytes"]))).collect()
}
