//! Writes the demonstration's files: documents in, questions and a corpus out.

use std::path::{Path, PathBuf};

use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha12Rng;

use super::documents::{DemoDocument, DocumentSource, MAX_CHARACTERS, collect, usual_sources};
use super::questions::{Pool, ask};
use super::{DemoReport, Options};
use crate::data::DataError;
use crate::data::longbench_v2::Record;
use crate::files;

/// Text gathered per text needed: lengths are drawn, and documents are given to one side whole.
const RESERVE: f64 = 1.5;

/// More than tokenizers reach on such texts. Documents are gathered and divided for this, so that both sides stay as they
/// are when the questions are made again with a tokenizer that was trained on the corpus of a first time.
const MOST_CHARS_PER_TOKEN: f64 = 5.0;

/// Bytes of each source that go into the corpus.
const CORPUS_BYTES: usize = 1_000_000;

/// Makes `train.json`, `validation.json` and `corpus/*.txt` in `out_dir`. The same documents and options give the same files.
pub fn make(out_dir: &Path, options: &Options) -> Result<DemoReport, DataError> {
    check(options)?;
    let sources = if options.folders.is_empty() {
        usual_sources()
    } else {
        let folder = |(index, folder): (usize, &PathBuf)| DocumentSource::new(&format!("folder-{index}"), folder);
        options.folders.iter().enumerate().map(folder).collect()
    };
    let samples = options.train_samples + options.validation_samples;
    let chars_per_token = options.chars_per_token.max(MOST_CHARS_PER_TOKEN);
    let mean = (options.min_tokens + options.max_tokens) as f64 / 2.0 * chars_per_token;
    let wanted = (mean * RESERVE * samples as f64) as usize + 2 * MAX_CHARACTERS;
    let mut documents = collect(&sources, wanted, options.seed);
    let found = documents.iter().map(|document| document.text.len()).sum();
    let mut rng = ChaCha12Rng::seed_from_u64(options.seed);
    documents.shuffle(&mut rng);
    let held_out = take_share(&mut documents, options.validation_samples as f64 / samples as f64);
    let short = || DataError::TooLittleText { expected: wanted, found };
    let train_records = questions(&documents, options.train_samples, options, &mut rng)?.ok_or_else(short)?;
    let held_out_records = questions(&held_out, options.validation_samples, options, &mut rng)?.ok_or_else(short)?;
    let corpus_dir = out_dir.join("corpus");
    std::fs::create_dir_all(&corpus_dir).map_err(|source| DataError::Write { path: corpus_dir.clone(), source })?;
    let all = || train_records.iter().chain(&held_out_records);
    let tokens = all().map(|record| count(&record.context, options)).collect::<Result<Vec<_>, _>>()?;
    let sources_used = |(index, source): (usize, &DocumentSource)| {
        let count = documents.iter().chain(&held_out).filter(|document| document.source == index).count();
        (source.name.clone(), count)
    };
    Ok(DemoReport {
        train: write_records(out_dir, "train.json", &train_records)?,
        validation: write_records(out_dir, "validation.json", &held_out_records)?,
        corpus: write_corpus(&corpus_dir, &documents, &sources, &train_records)?,
        documents: (documents.len(), held_out.len()),
        context_tokens: (tokens.iter().copied().min().unwrap_or(0), tokens.iter().copied().max().unwrap_or(0)),
        sources: sources.iter().enumerate().map(sources_used).filter(|&(_, count)| count > 0).collect(),
    })
}

fn check(options: &Options) -> Result<(), DataError> {
    let refuse = |what, expected: &str, found: String| Err(DataError::Options { what, expected: expected.to_owned(), found });
    if options.train_samples == 0 || options.validation_samples == 0 {
        return refuse("samples", "at least 1 to train on and 1 held out", "0".to_owned());
    }
    if options.min_tokens == 0 || options.min_tokens > options.max_tokens {
        let found = format!("{} to {}", options.min_tokens, options.max_tokens);
        return refuse("tokens per context", "a range that begins above 0", found);
    }
    if !(options.chars_per_token > 0.1 && options.chars_per_token < 100.0) {
        return refuse("characters per token", "a number from 0.1 to 100", options.chars_per_token.to_string());
    }
    Ok(())
}

fn count(text: &str, options: &Options) -> Result<usize, DataError> {
    match &options.tokenizer {
        Some(tokenizer) => Ok(tokenizer.encode(text)?.len()),
        None => Ok((text.len() as f64 / options.chars_per_token).round() as usize),
    }
}

/// Takes whole documents out until `share` of all text is reached.
fn take_share(documents: &mut Vec<DemoDocument>, share: f64) -> Vec<DemoDocument> {
    let total: usize = documents.iter().map(|document| document.text.len()).sum();
    let wanted = (total as f64 * share) as usize;
    let mut taken = Vec::new();
    let mut size = 0;
    while size < wanted {
        let Some(document) = documents.pop() else { break };
        size += document.text.len();
        taken.push(document);
    }
    taken
}

/// `None` when the documents don't suffice.
fn questions(
    documents: &[DemoDocument],
    number: usize,
    options: &Options,
    rng: &mut ChaCha12Rng,
) -> Result<Option<Vec<Record>>, DataError> {
    let mut pool = Pool::new(documents, rng);
    // Each letter is right equally often: guessing one letter always gives exactly chance.
    let mut letters: Vec<usize> = (0..number).map(|index| index % 4).collect();
    letters.shuffle(rng);
    // A tokenizer that fails counts as 0 here and reports its error below.
    let measure = |text: &str| count(text, options).unwrap_or(0).max(1);
    count("", options)?;
    let mut records = Vec::with_capacity(number);
    for letter in letters {
        let wanted = rng.random_range(options.min_tokens..=options.max_tokens);
        let Some(context) = pool.context(wanted, &measure) else { return Ok(None) };
        records.push(ask(&context, letter, rng));
    }
    Ok(Some(records))
}

fn write_records(dir: &Path, name: &str, records: &[Record]) -> Result<PathBuf, DataError> {
    let path = dir.join(name);
    let json = serde_json::to_vec_pretty(records);
    let json = json.map_err(|error| DataError::NotJson { place: path.display().to_string(), message: error.to_string() })?;
    files::write_atomic(&path, &json)?;
    Ok(path)
}

/// One file per source, of training documents only, and the training questions without their contexts.
fn write_corpus(
    dir: &Path,
    documents: &[DemoDocument],
    sources: &[DocumentSource],
    records: &[Record],
) -> Result<Vec<PathBuf>, DataError> {
    let mut paths = Vec::new();
    let mut write = |name: &str, text: &str| -> Result<(), DataError> {
        let path = dir.join(format!("{name}.txt"));
        files::write_atomic(&path, text.as_bytes())?;
        paths.push(path);
        Ok(())
    };
    for (index, source) in sources.iter().enumerate() {
        let mut text = String::new();
        for document in documents.iter().filter(|document| document.source == index) {
            if text.len() < CORPUS_BYTES {
                text.push_str(&document.text);
                text.push_str("\n\n");
            }
        }
        if !text.is_empty() {
            write(&source.name, &text)?;
        }
    }
    let questions: Vec<String> =
        records.iter().map(|record| Record { context: String::new(), ..record.clone() }.prompt()).collect();
    write("questions", &questions.join("\n\n"))?;
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::fixtures::tokenizer;

    fn documents(dir: &Path, number: usize) {
        for index in 0..number {
            let line = format!("Document number {index} says something long about caches of keys and values.\n\n");
            std::fs::write(dir.join(format!("{index}a.txt")), line.repeat(400)).unwrap();
        }
    }

    fn options(dir: &Path) -> Options {
        Options {
            train_samples: 8,
            validation_samples: 4,
            min_tokens: 2_000,
            max_tokens: 4_000,
            folders: vec![dir.to_path_buf()],
            seed: 3,
            ..Options::default()
        }
    }

    #[test]
    fn makes_questions_from_different_documents() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("documents");
        std::fs::create_dir(&folder).unwrap();
        documents(&folder, 30);
        let out = dir.path().join("out");
        let report = make(&out, &options(&folder)).unwrap();
        let read = |path: &Path| serde_json::from_slice::<Vec<Record>>(&std::fs::read(path).unwrap()).unwrap();
        let (train, held_out) = (read(&report.train), read(&report.validation));
        assert_eq!((train.len(), held_out.len()), (8, 4));
        let titles = |records: &[Record]| {
            let lines =
                records.iter().flat_map(|record| record.context.lines()).filter(|line| line.starts_with("Document number"));
            lines.map(str::to_owned).collect::<std::collections::BTreeSet<_>>()
        };
        assert!(titles(&train).is_disjoint(&titles(&held_out)));
        for letter in ["A", "B", "C", "D"] {
            assert_eq!(train.iter().filter(|record| record.answer == letter).count(), 2);
        }
        assert!(report.context_tokens.0 >= 1_900 && report.context_tokens.1 <= 4_100, "{report}");
        let again = make(&dir.path().join("again"), &options(&folder)).unwrap();
        assert!(std::fs::read(&report.train).unwrap() == std::fs::read(&again.train).unwrap());
        let corpus = std::fs::read_to_string(&report.corpus[0]).unwrap();
        assert!(titles(&held_out).iter().all(|line| !corpus.contains(line)));

        let exact = make(&out, &Options { tokenizer: Some(tokenizer()), ..options(&folder) }).unwrap();
        assert!(exact.context_tokens.0 >= 1_900 && exact.context_tokens.1 <= 4_100, "{exact}");
        // The corpus of the first time holds nothing of what is held out in the second.
        assert!(titles(&read(&exact.validation)).iter().all(|line| !corpus.contains(line)));
    }

    #[test]
    fn refuses_what_cannot_be_made() {
        let dir = tempfile::tempdir().unwrap();
        documents(dir.path(), 2);
        let error = make(dir.path(), &options(dir.path())).unwrap_err();
        assert!(matches!(error, DataError::TooLittleText { .. }), "{error}");
        let wrong = Options { min_tokens: 9, max_tokens: 8, ..options(dir.path()) };
        let error = make(dir.path(), &wrong).unwrap_err();
        assert_eq!(error.to_string(), "tokens per context: expected a range that begins above 0, found 9 to 8");
        assert!(make(dir.path(), &Options { train_samples: 0, ..options(dir.path()) }).is_err());
        assert!(make(dir.path(), &Options { chars_per_token: f64::NAN, ..options(dir.path()) }).is_err());
    }
}
