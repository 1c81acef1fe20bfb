//! Three long-range tasks of RULER's kinds (Hsieh et al. 2024, arXiv 2404.06654) in a language of 512 words, as data of the format
//! `tokens`: facts scattered over noise, and questions at the end. The same options make the same files.
//!
//! | task | facts | a question |
//! |---|---|---|
//! | `needle` | 4 of `note key value` | `ask key` → value, once |
//! | `keys` | 16 of `note key value` | `ask key` → value, four different keys |
//! | `variables` | 4 chains of `set a value`, `set b a` | `ask b` → value, for one end of a chain |
//!
//! The words: 0 ends, 1 `note`, 2 `ask`, 3 `set`; 16 to 111 are keys, 112 to 207 values, 208 to 271 variables, 272 to 511 noise.

use std::error::Error;
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use rand::rngs::ChaCha12Rng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use serde_json::json;

/// What the format takes for "no target".
const IGNORE: i64 = -100;

const NOTE: u32 = 1;
const ASK: u32 = 2;
const SET: u32 = 3;
const KEYS: Range<u32> = 16..112;
const VALUES: Range<u32> = 112..208;
const VARIABLES: Range<u32> = 208..272;
const NOISE: Range<u32> = 272..512;

/// One of the tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LongRangeTask {
    /// One key is asked for.
    Needle,
    /// Several keys are asked for.
    Keys,
    /// The value at the end of a chain of assignments is asked for.
    Variables,
}

impl LongRangeTask {
    /// All of them.
    const ALL: [Self; 3] = [Self::Needle, Self::Keys, Self::Variables];

    /// As its file is called.
    fn name(self) -> &'static str {
        match self {
            Self::Needle => "needle",
            Self::Keys => "keys",
            Self::Variables => "variables",
        }
    }

    fn draw(self, rng: &mut ChaCha12Rng) -> SampleFacts {
        match self {
            Self::Needle => pairs(rng, 4, 1),
            Self::Keys => pairs(rng, 16, 4),
            Self::Variables => chains(rng),
        }
    }
}

/// What a sample is about.
struct SampleFacts {
    /// Facts; those of a chain must appear in their order.
    chains: Vec<Vec<[u32; 3]>>,
    /// All that can be asked, with the answer.
    known: Vec<(u32, u32)>,
    /// How many of these, from the front, the task asks.
    questions: usize,
}

/// Independent facts, of which some are asked for.
fn pairs(rng: &mut ChaCha12Rng, facts: usize, questions: usize) -> SampleFacts {
    let (keys, values) = (distinct(rng, KEYS, facts), distinct(rng, VALUES, facts));
    let known: Vec<(u32, u32)> = keys.into_iter().zip(values).collect();
    let chains = known.iter().map(|&(key, value)| vec![[NOTE, key, value]]).collect();
    SampleFacts { chains, known, questions }
}

/// Four chains of two assignments, of which one is asked for.
fn chains(rng: &mut ChaCha12Rng) -> SampleFacts {
    let (names, values) = (distinct(rng, VARIABLES, 8), distinct(rng, VALUES, 4));
    let chain = |c: usize| vec![[SET, names[2 * c], values[c]], [SET, names[2 * c + 1], names[2 * c]]];
    // The end of the first chain stands first.
    let known = [1, 3, 5, 7, 0, 2, 4, 6].into_iter().map(|name| (names[name], values[name / 2])).collect();
    SampleFacts { chains: (0..4).map(chain).collect(), known, questions: 1 }
}

fn distinct(rng: &mut ChaCha12Rng, range: Range<u32>, count: usize) -> Vec<u32> {
    let mut all: Vec<u32> = range.collect();
    all.shuffle(rng);
    all.truncate(count);
    all
}

/// Tokens of the shortest sample: 16 facts with a word between them, and 4 questions, or 16 where all that is known is asked.
fn least_tokens(asks_all: bool) -> usize {
    3 * 16 + 15 + 3 * if asks_all { 16 } else { 4 }
}

/// Words of the shortest passage that is copied.
const SHORTEST_PASSAGE: usize = 8;

#[derive(Clone, Debug, Parser)]
struct Options {
    /// Directory to write `train.jsonl` and `test-TASK.jsonl` to, in the format `tokens`, of 512 words.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Tokens of a sample.
    #[arg(long, default_value_t = 512)]
    tokens: usize,
    /// Training samples of each task.
    #[arg(long, default_value_t = 4096)]
    train_samples: usize,
    /// Test samples of each task.
    #[arg(long, default_value_t = 256)]
    test_samples: usize,
    /// Let training samples ask all that they know, not only as much as the test samples do: more to learn from per token.
    #[arg(long)]
    ask_all: bool,
    /// Put a copy behind every training sample: a passage over and over, whose repetitions are to be predicted. A model that knows
    /// nothing yet learns from copying to look up.
    #[arg(long)]
    copies: bool,
    /// Seed of facts, questions, places and noise.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[allow(clippy::print_stderr)]
fn main() -> ExitCode {
    match make(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Writes `train.jsonl`, which mixes the tasks, and `test-TASK.jsonl` for each of them.
fn make(options: &Options) -> Result<(), Box<dyn Error>> {
    let least = least_tokens(options.ask_all);
    if options.tokens < least {
        return Err(format!("`--tokens`: expected at least {least}, found {}", options.tokens).into());
    }
    std::fs::create_dir_all(&options.out)?;
    let write = |name: &str, lines: Vec<String>| std::fs::write(options.out.join(name), lines.join("\n") + "\n");
    // Every file has a seed of its own, so that none depends on how many samples the others have.
    let rng = |stream| {
        let mut rng = ChaCha12Rng::seed_from_u64(options.seed);
        rng.set_stream(stream);
        rng
    };
    let mut training = rng(0);
    let mut lines = Vec::new();
    for task in (0..options.train_samples).flat_map(|_| LongRangeTask::ALL) {
        lines.push(sample(task, options.tokens, options.ask_all, &mut training));
        if options.copies {
            lines.push(copy(options.tokens, &mut training));
        }
    }
    write("train.jsonl", lines)?;
    for (task, stream) in LongRangeTask::ALL.into_iter().zip(1..) {
        let mut testing = rng(stream);
        let lines = (0..options.test_samples).map(|_| sample(task, options.tokens, false, &mut testing)).collect();
        write(&test_file(task), lines)?;
    }
    Ok(())
}

fn test_file(task: LongRangeTask) -> String {
    format!("test-{}.jsonl", task.name())
}

/// One line: noise with the facts in it, then the questions; the answers are the targets.
fn sample(task: LongRangeTask, tokens: usize, asks_all: bool, rng: &mut ChaCha12Rng) -> String {
    let SampleFacts { chains, known: mut questions, questions: asked } = task.draw(rng);
    if asks_all {
        questions.shuffle(rng);
    } else {
        questions.truncate(asked);
    }
    let room = tokens - 3 * questions.len();
    let num_facts: usize = chains.iter().map(Vec::len).sum();
    // Facts are drawn onto places between noise words; a chain takes its places in their order.
    let mut places: Vec<usize> = (0..=room - 3 * num_facts).collect();
    places.shuffle(rng);
    let mut facts: Vec<(usize, [u32; 3])> = Vec::with_capacity(num_facts);
    let mut taken = places.into_iter();
    for chain in chains {
        let mut own: Vec<usize> = taken.by_ref().take(chain.len()).collect();
        own.sort_unstable();
        facts.extend(own.into_iter().zip(chain));
    }
    facts.sort_unstable();
    let mut ids = Vec::with_capacity(tokens);
    let mut facts = facts.into_iter().peekable();
    for place in 0..=room - 3 * num_facts {
        while let Some((_, fact)) = facts.next_if(|(at, _)| *at == place) {
            ids.extend(fact);
        }
        if place < room - 3 * num_facts {
            ids.push(rng.random_range(NOISE));
        }
    }
    let mut labels = vec![IGNORE; ids.len()];
    for (asked, answer) in questions {
        ids.extend([ASK, asked, answer]);
        labels.extend([IGNORE, IGNORE, i64::from(answer)]);
    }
    json!({ "task": task.name(), "input_ids": ids, "labels": labels }).to_string()
}

/// A passage of any words, over and over; from its second word on, the repetition is the target. Its length is drawn, or the distance
/// would do to find the next word, and nothing would be learnt about looking up.
fn copy(tokens: usize, rng: &mut ChaCha12Rng) -> String {
    let length = rng.random_range(SHORTEST_PASSAGE..=tokens / 2);
    let passage: Vec<u32> = (0..length).map(|_| rng.random_range(KEYS.start..NOISE.end)).collect();
    let ids: Vec<u32> = passage.iter().copied().cycle().take(tokens).collect();
    let label = |(i, &id): (usize, &u32)| if i > passage.len() { i64::from(id) } else { IGNORE };
    let labels: Vec<i64> = ids.iter().enumerate().map(label).collect();
    json!({ "task": "copy", "input_ids": ids, "labels": labels }).to_string()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::path::Path;

    use serde_json::Value;

    use super::*;

    fn options(out: &Path) -> Options {
        let line = ["", "--out", out.to_str().unwrap(), "--tokens", "128", "--train-samples", "20", "--test-samples", "10"];
        Options::parse_from(line)
    }

    /// The files, the training file first.
    fn files(options: &Options) -> [PathBuf; 4] {
        make(options).unwrap();
        ["train", "test-needle", "test-keys", "test-variables"].map(|name| options.out.join(format!("{name}.jsonl")))
    }

    fn sequences(path: &Path) -> Vec<(Vec<u32>, Vec<i64>)> {
        let numbers = |value: &Value| value.as_array().unwrap().iter().map(|x| x.as_i64().unwrap()).collect::<Vec<_>>();
        let text = std::fs::read_to_string(path).unwrap();
        let sequence = |line: &str| {
            let value: Value = serde_json::from_str(line).unwrap();
            (numbers(&value["input_ids"]).into_iter().map(|id| id as u32).collect(), numbers(&value["labels"]))
        };
        text.lines().map(sequence).collect()
    }

    /// The answer as a reader finds it: looking the name up until it leads to a value.
    fn look_up(ids: &[u32], mut name: u32) -> u32 {
        while !VALUES.contains(&name) {
            let fact = ids.windows(3).find(|w| [NOTE, SET].contains(&w[0]) && w[1] == name).unwrap();
            name = fact[2];
        }
        name
    }

    #[test]
    fn every_answer_can_be_found_and_only_answers_are_targets() {
        let dir = tempfile::tempdir().unwrap();
        for (file, questions) in files(&options(dir.path()))[1..].iter().zip([1, 4, 1]) {
            for (ids, labels) in sequences(file) {
                assert_eq!((ids.len(), labels.len()), (128, 128));
                assert!(ids.iter().all(|&id| id < NOISE.end));
                let targets: Vec<usize> = (0..128).filter(|&i| labels[i] != IGNORE).collect();
                assert_eq!(targets.len(), questions);
                for i in targets {
                    assert_eq!((ids[i - 2], i64::from(ids[i])), (ASK, labels[i]));
                    assert_eq!(look_up(&ids[..i - 2], ids[i - 1]), ids[i]);
                }
            }
        }
    }

    #[test]
    fn training_asks_all_that_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let sequences = sequences(&files(&Options { ask_all: true, ..options(dir.path()) })[0]);
        assert_eq!(sequences.len(), 60);
        for (i, (ids, labels)) in sequences.iter().enumerate() {
            let asked: Vec<usize> = (0..ids.len()).filter(|&i| labels[i] != IGNORE).collect();
            assert_eq!(asked.len(), [4, 16, 8][i % 3]);
            assert_eq!(asked.iter().map(|&i| ids[i - 1]).collect::<HashSet<_>>().len(), asked.len());
            assert!(asked.iter().all(|&i| look_up(&ids[..i - 2], ids[i - 1]) == ids[i]));
        }
    }

    #[test]
    fn copies_stand_between_the_training_samples() {
        let dir = tempfile::tempdir().unwrap();
        let sequences = sequences(&files(&Options { copies: true, ..options(dir.path()) })[0]);
        assert_eq!(sequences.len(), 120);
        for (_, labels) in sequences.iter().step_by(2) {
            assert!([1, 4].contains(&labels.iter().filter(|&&label| label != IGNORE).count()));
        }
        for (ids, labels) in sequences.iter().skip(1).step_by(2) {
            let first = labels.iter().position(|&label| label != IGNORE).unwrap();
            assert!((8..=64).contains(&(first - 1)));
            assert!((first..128).all(|i| labels[i] == i64::from(ids[i - (first - 1)])));
        }
    }

    #[test]
    fn the_shortest_samples_hold_all_their_facts() {
        for ask_all in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let tokens = least_tokens(ask_all);
            let short = Options { tokens, ask_all, ..options(dir.path()) };
            assert!(make(&Options { tokens: tokens - 1, ..short.clone() }).is_err());
            for file in &files(&short) {
                for (ids, labels) in sequences(file) {
                    assert_eq!((ids.len(), labels.len()), (tokens, tokens));
                    for i in (2..tokens).filter(|&i| labels[i] != IGNORE && ids[i - 2] == ASK) {
                        assert_eq!(look_up(&ids[..i - 2], ids[i - 1]), ids[i]);
                    }
                }
            }
        }
    }

    #[test]
    fn the_same_seed_makes_the_same_files_and_another_seed_others() {
        let dir = tempfile::tempdir().unwrap();
        let options = options(dir.path());
        let made = |options: &Options| files(options).map(|file| std::fs::read_to_string(file).unwrap());
        let first = made(&options);
        assert_eq!(first, made(&options));
        assert!(first.iter().zip(made(&Options { seed: 8, ..options.clone() })).all(|(a, b)| *a != b));
        // A test file is the same whatever the training file holds.
        assert_eq!(first[1..], made(&Options { train_samples: 3, ..options })[1..]);
    }
}
