//! How fast data become tokens, beside the tokenizer crate itself, and how fast they are there again.
//!
//! `cargo bench --bench tokenise [-- --documents 200 --tokens 32000]` draws documents from a seed, trains a tokenizer on some, and
//! prints tokens a second of the crate's own batch call on all cores and of the first opening of a data file; seconds and resident memory
//! of the second opening; and both openings of the same tokens as a file of `tokens`.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench that cannot go on fails")]

mod shapes;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use kvtune::data::{DataRequest, ModelLimits, Splits, Tokenizer, open, train_bpe};
use kvtune::native::resident_memory;
use kvtune::recipe::{DataRecipe, HeadRecipe, Recipe};
use rand::rngs::ChaCha12Rng;
use rand::{RngExt, SeedableRng};
use shapes::cpu_now;

const VOCABULARY: usize = 8192;

/// Bytes of text that the crate is handed at once.
const BATCH: usize = 1 << 22;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let number = |name: &str, default: usize| {
        let at = arguments.iter().position(|argument| argument == name);
        at.and_then(|at| arguments.get(at + 1)).map_or(default, |value| value.parse().unwrap())
    };
    let (documents, tokens) = (number("--documents", 200), number("--tokens", 32_000));
    let dir = tempfile::tempdir().unwrap();
    let texts = texts(documents, tokens);
    fs::write(dir.path().join("some.txt"), texts.iter().take(20).map(String::as_str).collect::<String>()).unwrap();
    fs::write(dir.path().join("tokenizer.json"), train_bpe(&[dir.path().join("some.txt")], VOCABULARY).unwrap()).unwrap();
    fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": 0}"#).unwrap();
    let tokenizer = Tokenizer::load(dir.path()).unwrap();
    let lines = texts.iter().map(|text| serde_json::json!({"prompt": text, "completion": "yes"}).to_string() + "\n");
    fs::write(dir.path().join("text.jsonl"), lines.collect::<String>()).unwrap();

    // Alternating, so that what else the machine does hits both.
    let (mut own, mut ours) = ([0.0_f64; 2], [0.0_f64; 2]);
    let best = |rates: &mut [f64; 2], tokens: usize, (began, cpu): (Instant, f64)| {
        let seconds = [began.elapsed().as_secs_f64(), cpu_now() - cpu];
        (0..2).for_each(|clock| rates[clock] = rates[clock].max(tokens as f64 / seconds[clock]));
    };
    for _ in 0..number("--rounds", 3) {
        let start = (Instant::now(), cpu_now());
        best(&mut own, crates_own(&dir.path().join("tokenizer.json"), &texts), start);
        let _ = fs::remove_dir_all(dir.path().join("text.jsonl.tokens"));
        let start = (Instant::now(), cpu_now());
        best(&mut ours, opened(dir.path(), "text", Some(&tokenizer)).train.lengths().iter().sum(), start);
    }
    drop(texts);
    for (clock, name) in ["second", "CPU-second"].into_iter().enumerate() {
        let (own, ours) = (own[clock] / 1e6, ours[clock] / 1e6);
        println!("M tokens a {name}: the crate {own:.3}, the first opening {ours:.3}, which is {:.1} %", 100.0 * ours / own);
    }
    again(dir.path(), "text", Some(&tokenizer));

    let ids = opened(dir.path(), "text", Some(&tokenizer)).train;
    let mut file = String::new();
    for sample in 0..ids.len() {
        let inputs = ids.batch(&[sample]).unwrap().sequences.swap_remove(0).inputs;
        writeln!(file, "{}", serde_json::json!({"input_ids": inputs, "labels": inputs})).unwrap();
    }
    fs::write(dir.path().join("tokens.jsonl"), file).unwrap();
    let began = Instant::now();
    drop(opened(dir.path(), "tokens", None));
    println!("tokens: first opening {:.3} s", began.elapsed().as_secs_f64());
    again(dir.path(), "tokens", None);
}

/// Words of a few thousand, by Zipf's law, of a few syllables each.
fn texts(documents: usize, tokens: usize) -> Vec<String> {
    let mut rng = ChaCha12Rng::seed_from_u64(1);
    let mut syllable = || ["ka", "lo", "min", "tre", "s", "ua", "be", "dor", "in", "ght"][rng.random_range(0..10)];
    let words: Vec<String> = (0..20_000).map(|word| (0..2 + word % 4).map(|_| syllable()).collect()).collect();
    let text = |_| {
        let mut text = String::new();
        for _ in 0..tokens {
            let word = (words.len() as f64).powf(rng.random_range(0.0..1.0)) as usize;
            text.push_str(&words[word.min(words.len() - 1)]);
            text.push(if rng.random_range(0..12) == 0 { '\n' } else { ' ' });
        }
        text
    };
    (0..documents).map(text).collect()
}

/// Tokens that the crate's batch call makes.
fn crates_own(path: &Path, texts: &[String]) -> usize {
    let tokenizer = tokenizers::Tokenizer::from_file(path).unwrap();
    let mut tokens = 0;
    let mut batch = Vec::new();
    let mut bytes = 0;
    for (index, text) in texts.iter().enumerate() {
        batch.push(text.as_str());
        bytes += text.len();
        if bytes >= BATCH || index + 1 == texts.len() {
            let encodings = tokenizer.encode_batch_fast(std::mem::take(&mut batch), true).unwrap();
            tokens += encodings.iter().map(|encoding| encoding.get_ids().len()).sum::<usize>();
            bytes = 0;
        }
    }
    tokens
}

fn opened(dir: &Path, name: &str, tokenizer: Option<&Tokenizer>) -> Splits {
    let format = if name == "text" { "prompt-completion" } else { "tokens" };
    let recipe = format!(
        "model.path = '.'\ndata = {{format = '{format}', train = '{name}.jsonl', validation_fraction = 0}}\nlora.r = 1\n\
         [kv_cache]\ncache_length = 64\n"
    );
    let recipe: DataRecipe = Recipe::parse(recipe, &PathBuf::from(dir).join("recipe.toml"), &[]).unwrap().recipe.data;
    let limits = ModelLimits { vocab_size: VOCABULARY, trained_positions: 1 << 24, computable_positions: 1 << 24, pad: None };
    let head = &HeadRecipe::NextToken;
    open(&DataRequest { recipe: &recipe, head, tokenizer, limits, initial: None, seed: 1 }, &mut |_, _, _| {}).unwrap()
}

/// The second opening, and the first batch.
fn again(dir: &Path, name: &str, tokenizer: Option<&Tokenizer>) {
    let before = resident_memory().unwrap();
    let began = Instant::now();
    let splits = opened(dir, name, tokenizer);
    let seconds = began.elapsed().as_secs_f64();
    drop(splits.train.batch(&[0]).unwrap());
    let total: usize = splits.train.lengths().iter().sum();
    println!(
        "{name}: {} samples, {:.1} M tokens are there again after {seconds:.3} s and take {:.1} MiB ({})",
        splits.train.len(),
        total as f64 / 1e6,
        (resident_memory().unwrap() as f64 - before as f64) / f64::from(1 << 20),
        splits.files[0],
    );
}
