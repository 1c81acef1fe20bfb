//! Makes the data of `make demo`: long documents with questions in LongBench v2's form, from plain texts that are on this machine.
//!
//! Nothing is downloaded. The documents to train on and those held out share no text, and the same texts and options make the same files.
//! An example and no part of `kvtune`: whoever fine-tunes has data.

use std::collections::HashMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::Parser;
use rand::rngs::ChaCha12Rng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

/// A shorter text makes no document.
const SHORTEST_TEXT: usize = 4_000;

/// Of a longer one, this beginning is read: a single file must not make up the whole data.
const LONGEST_TEXT: usize = 120_000;

/// Texts of one family at most (files in a folder whose names begin with the same word): generated pages repeat each other.
const TEXTS_OF_A_FAMILY: usize = 6;

/// Text gathered per text needed: lengths are drawn, and documents are held out whole.
const RESERVE: f64 = 1.5;

/// Characters per token of a small vocabulary that was made of such texts.
const CHARACTERS_PER_TOKEN: usize = 3;

/// Characters of one piece of a document within a context: several documents make up each context.
const PIECE: usize = 16_000;

/// Where in the context the sentence may stand that answers the question: always far from the question, which stands behind the context.
const DEPTH: std::ops::Range<f64> = 0.02..0.6;

const NAMES: [&str; 16] = [
    "amber", "anchor", "basalt", "beacon", "birch", "bronze", "cedar", "cobalt", "copper", "coral", "falcon", "garnet", "harbor",
    "juniper", "lantern", "willow",
];

const CODES: [&str; 16] = [
    "apple", "arrow", "bottle", "bridge", "candle", "castle", "dragon", "feather", "garden", "hammer", "island", "kettle",
    "mirror", "ocean", "rabbit", "window",
];

#[derive(Parser)]
struct Options {
    /// Directory to write `train.json`, `validation.json` and `corpus.txt` (the training documents, for a tokenizer) to.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Folder to look for texts in, instead of the usual places of a Debian machine with Rust; may be given several times.
    #[arg(long, value_name = "DIR")]
    from: Vec<PathBuf>,
    /// Documents to train on.
    #[arg(long, default_value_t = 12)]
    train_samples: usize,
    /// Documents held out.
    #[arg(long, default_value_t = 4)]
    validation_samples: usize,
    /// Shortest document, in tokens of about three characters.
    #[arg(long, default_value_t = 8_192)]
    min_tokens: usize,
    /// Longest document, in such tokens.
    #[arg(long, default_value_t = 32_768)]
    max_tokens: usize,
    /// Seed of the choice of texts, questions and places.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[allow(clippy::print_stdout, clippy::print_stderr)]
fn main() -> ExitCode {
    match make(&Options::parse()) {
        Ok(said) => {
            println!("{said}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Writes the files; returns what to tell about them.
fn make(options: &Options) -> Result<String, Box<dyn Error>> {
    if options.min_tokens > options.max_tokens {
        return Err("`--min-tokens` is above `--max-tokens`".into());
    }
    let samples = options.train_samples + options.validation_samples;
    let mean = options.min_tokens.midpoint(options.max_tokens) * CHARACTERS_PER_TOKEN;
    let wanted = (mean as f64 * RESERVE * samples as f64) as usize + 2 * LONGEST_TEXT;
    let folders = if options.from.is_empty() { usual_folders() } else { options.from.clone() };
    let mut rng = ChaCha12Rng::seed_from_u64(options.seed);
    let mut documents = collect(&folders, wanted, &mut rng);
    documents.shuffle(&mut rng);
    let held_out = take_share(&mut documents, options.validation_samples as f64 / samples as f64);
    std::fs::create_dir_all(&options.out)?;
    let write = |name: &str, records: &[Value]| std::fs::write(options.out.join(name), format!("{:#}\n", json!(records)));
    write("train.json", &questions(&documents, options.train_samples, options, &mut rng)?)?;
    write("validation.json", &questions(&held_out, options.validation_samples, options, &mut rng)?)?;
    let corpus: Vec<&str> = documents.iter().map(|document| document.text.as_str()).collect();
    std::fs::write(options.out.join("corpus.txt"), corpus.join("\n\n"))?;
    let (train, held_out) = (documents.len(), held_out.len());
    Ok(format!("{train} texts to train on, {held_out} others held out; wrote {}", options.out.display()))
}

/// A text and what it is called.
struct Document {
    title: String,
    text: String,
}

fn usual_folders() -> Vec<PathBuf> {
    let mut folders = vec![PathBuf::from("/usr/share/common-licenses"), PathBuf::from("/usr/share/doc")];
    if let Ok(said) = Command::new("rustc").args(["--print", "sysroot"]).output() {
        let sysroot = PathBuf::from(String::from_utf8_lossy(&said.stdout).trim());
        folders.extend([sysroot.join("share/doc"), sysroot.join("lib/rustlib/src")]);
    }
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    folders.extend(variable("LIBTORCH").map(|libtorch| libtorch.join("include")));
    let cargo = variable("CARGO_HOME").or_else(|| variable("HOME").map(|home| home.join(".cargo")));
    folders.extend(cargo.map(|cargo| cargo.join("registry/src")));
    folders
}

/// Texts of about `wanted` characters altogether, fewer if there are no more: evenly from all folders, and programs only where prose does
/// not suffice.
fn collect(folders: &[PathBuf], wanted: usize, rng: &mut ChaCha12Rng) -> Vec<Document> {
    let mut documents: Vec<Document> = Vec::new();
    let mut total = 0;
    for is_wanted in [is_prose, is_program] {
        let mut queues: Vec<Vec<PathBuf>> = folders.iter().map(|folder| candidates(folder, is_wanted, rng)).collect();
        let mut taken = vec![0; folders.len()];
        while let Some(folder) = (0..folders.len()).filter(|&f| !queues[f].is_empty()).min_by_key(|&f| taken[f]) {
            if total >= wanted {
                return documents;
            }
            let Some(path) = queues[folder].pop() else { continue };
            let Some(text) = read_text(&path) else { continue };
            if documents.iter().all(|known| known.text != text) {
                total += text.len();
                taken[folder] += text.len();
                documents.push(Document { title: title(&path), text });
            }
        }
    }
    documents
}

/// The files below a folder that are wanted, at most a few of each family, in a drawn order.
fn candidates(folder: &Path, is_wanted: fn(&Path) -> bool, rng: &mut ChaCha12Rng) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    walk(folder, is_wanted, &mut paths);
    // A directory lists its files in any order.
    paths.sort();
    paths.shuffle(rng);
    let mut families: HashMap<PathBuf, usize> = HashMap::new();
    paths.retain(|path| {
        let word: String = name(path).chars().take_while(|c| c.is_alphanumeric()).collect();
        let count = families.entry(path.with_file_name(word)).or_default();
        *count += 1;
        *count <= TEXTS_OF_A_FAMILY
    });
    paths
}

fn walk(folder: &Path, is_wanted: fn(&Path) -> bool, paths: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        // Links lead to what is found elsewhere, or in circles.
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => walk(&entry.path(), is_wanted, paths),
            Ok(kind) if kind.is_file() && is_wanted(&entry.path()) => paths.push(entry.path()),
            _ => {}
        }
    }
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn title(path: &Path) -> String {
    format!("{}/{}", path.parent().map(name).unwrap_or_default(), name(path))
}

fn is_prose(path: &Path) -> bool {
    let name = name(path).to_lowercase();
    // Licences are the same in many packages, changes are lists of names and numbers.
    let is_other = ["licen", "copy", "notice", "change"].iter().any(|word| name.starts_with(word));
    // `GPL-2.1`, `README.Debian`: a dot in the name of a text.
    let is_text = |ending: &str| ["md", "txt", "rst", "debian"].contains(&ending) || ending.bytes().all(|b| b.is_ascii_digit());
    !is_other && name.rsplit_once('.').is_none_or(|(_, ending)| is_text(ending))
}

fn is_program(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "rs" || ending == "h")
}

/// A file's text without rows of empty lines, cut at a line's end where it is too long; `None` where it is too short or no text.
fn read_text(path: &Path) -> Option<String> {
    let content = std::fs::read_to_string(path).ok()?;
    let mut text = String::new();
    for line in content.lines().map(str::trim_end).take_while(|line| !line.contains('\0')) {
        if text.len() + line.len() > LONGEST_TEXT {
            break;
        }
        if !line.is_empty() || !text.ends_with("\n\n") {
            text.push_str(line);
            text.push('\n');
        }
    }
    (text.len() >= SHORTEST_TEXT).then_some(text)
}

/// Takes whole documents out until `share` of all text is reached.
fn take_share(documents: &mut Vec<Document>, share: f64) -> Vec<Document> {
    let length = |documents: &[Document]| documents.iter().map(|document| document.text.len()).sum::<usize>() as f64;
    let wanted = length(documents) * share;
    let mut taken = Vec::new();
    while length(&taken) < wanted {
        taken.extend(documents.pop());
    }
    taken
}

fn questions(
    documents: &[Document],
    number: usize,
    options: &Options,
    rng: &mut ChaCha12Rng,
) -> Result<Vec<Value>, Box<dyn Error>> {
    let mut pieces: Vec<String> = Vec::new();
    for Document { title, text } in documents {
        pieces.extend(split_at_lines(text, PIECE).iter().map(|piece| format!("# {title}\n\n{piece}\n")));
    }
    pieces.shuffle(rng);
    // Each letter is right equally often: guessing one letter always gives exactly chance.
    let mut letters: Vec<usize> = (0..number).map(|index| index % 4).collect();
    letters.shuffle(rng);
    let mut records = Vec::with_capacity(number);
    for letter in letters {
        let length = rng.random_range(options.min_tokens..=options.max_tokens) * CHARACTERS_PER_TOKEN;
        let mut context = String::new();
        while context.len() < length {
            context.push_str(&pieces.pop().ok_or("too little text: ask for fewer or shorter samples, or name more folders")?);
        }
        let context = split_at_lines(&context, length)[0];
        records.push(ask(context, letter, rng));
    }
    Ok(records)
}

/// Parts of at most about `size` bytes, cut behind a line's end where there is one in the second half of a part.
fn split_at_lines(text: &str, size: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text;
    while rest.len() > size {
        let end = char_border(rest, size);
        let end = rest[..end].rfind('\n').filter(|&line| line >= size / 2).map_or(end, |line| line + 1);
        let (part, after) = rest.split_at(end);
        parts.push(part);
        rest = after;
    }
    parts.push(rest);
    parts
}

/// The first border of characters at or behind a byte.
fn char_border(text: &str, from: usize) -> usize {
    (from..text.len()).find(|&at| text.is_char_boundary(at)).unwrap_or(text.len())
}

/// Hides a sentence in the context and asks for it; `letter` (0 to 3) is the right answer.
fn ask(context: &str, letter: usize, rng: &mut ChaCha12Rng) -> Value {
    let answer = ["A", "B", "C", "D"][letter];
    let name = NAMES.choose(rng).copied().unwrap_or_default();
    let mut codes = CODES;
    codes.shuffle(rng);
    let at = char_border(context, (context.len() as f64 * rng.random_range(DEPTH)) as usize);
    let at = context[at..].find('\n').map_or(at, |line| at + line + 1);
    let (before, after) = context.split_at(at);
    json!({
        "_id": format!("{:016x}", rng.random::<u64>()),
        "domain": "Multi-Document QA",
        "sub_domain": "Hidden sentence",
        "difficulty": "easy",
        "length": "short",
        "question": format!("What is the access code of the {name} archive?"),
        "choice_A": codes[0],
        "choice_B": codes[1],
        "choice_C": codes[2],
        "choice_D": codes[3],
        "answer": answer,
        "context": format!("{before}\nThe access code of the {name} archive is {}.\n\n{after}", codes[letter]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_from_different_texts_whose_answers_stand_far_away() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("texts");
        std::fs::create_dir(&from).unwrap();
        for index in 0..30 {
            let line = format!("Text number {index} says something long about caches of kéys and values.\n\n\n");
            std::fs::write(from.join(format!("{index}a.txt")), line.repeat(400)).unwrap();
        }
        std::fs::write(from.join("short.md"), "too short").unwrap();
        std::fs::write(from.join("binary.txt"), [0xff; 9000]).unwrap();
        std::fs::write(from.join("page.html"), "<p>".repeat(9000)).unwrap();
        let made = |out: &str, from: &Path| {
            let out = dir.path().join(out);
            let [out, from] = [&out, from].map(|path| path.to_str().unwrap());
            let line = ["", "--out", out, "--from", from, "--train-samples", "8", "--min-tokens", "2000", "--max-tokens", "4000"];
            make(&Options::parse_from(line))?;
            let read = |name: &str| std::fs::read_to_string(Path::new(out).join(name)).unwrap();
            Ok::<_, Box<dyn Error>>(["train.json", "validation.json", "corpus.txt"].map(read))
        };
        let files = made("first", &from).unwrap();
        assert_eq!(files, made("again", &from).unwrap());
        let [train, held_out] = [0, 1].map(|i| serde_json::from_str::<Vec<Value>>(&files[i]).unwrap());
        assert_eq!((train.len(), held_out.len()), (8, 4));
        for letter in ["A", "B", "C", "D"] {
            assert_eq!(train.iter().filter(|record| record["answer"] == letter).count(), 2);
        }
        for record in train.iter().chain(&held_out) {
            let context = record["context"].as_str().unwrap();
            assert!((5_900..12_200).contains(&context.len()), "{}", context.len());
            let answer = record["answer"].as_str().unwrap();
            let sentence = format!(" archive is {}.\n", record[format!("choice_{answer}")].as_str().unwrap());
            assert!(context.find(&sentence).unwrap() < context.len() * 7 / 10);
        }
        let numbers = |text: &str| text.lines().filter(|line| line.starts_with("Text number")).map(str::to_owned).collect();
        let texts = |records: &[Value]| -> std::collections::HashSet<String> {
            records.iter().flat_map(|record| -> Vec<String> { numbers(record["context"].as_str().unwrap()) }).collect()
        };
        assert!(texts(&train).is_disjoint(&texts(&held_out)));
        assert!(texts(&held_out).iter().all(|line| !files[2].contains(line)));

        let empty = dir.path().join("empty");
        assert!(made("none", &empty).unwrap_err().to_string().starts_with("too little text"));
    }
}
