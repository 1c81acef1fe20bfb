//! The door of the room: from the recipe's `data` table to data sets ready to be batched.

use std::num::NonZero;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::bad_rows::BadRows;
use super::dataset::{Dataset, Samples};
use super::encode::Encoder;
use super::error::DataError;
use super::example::{Example, Task};
use super::formats::{ExampleReader, each_example};
use super::initial_part::InitialPartFinder;
use super::label_tokens::Classes;
use super::length_cache::{self, Key};
use super::load_report::{FileReport, LengthSource, LoadReport};
use super::on_too_long::{Fit, Length, fit};
use super::rows::SplitName;
use super::source::DataSource;
use super::split::split;
use super::tokenizer::Tokenizer;
use crate::files;
use crate::recipe::{DataFormat, DataPaths, DataRecipe, HeadRecipe, InitialPart, ValidationSource};

/// What the model allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelLimits {
    /// Rows of its embedding: token ids are below this.
    pub vocab_size: usize,
    /// Longest sequence it was made for.
    pub max_positions: usize,
}

/// Opened data.
#[derive(Debug)]
pub struct Splits {
    /// What is trained on.
    pub train: Dataset,
    /// What is held out; `None` for a fraction of 0 or a file of one sample.
    pub validation: Option<Dataset>,
    /// What `data.on_too_long = "drop"` has left out of the training file, as far as the model has positions; `None` where that is none.
    pub rest: Option<Dataset>,
    /// What was read, dropped and cut.
    pub report: LoadReport,
}

/// Reads the recipe's files, finds the samples that fit, and splits them by `seed` where there is no validation file.
///
/// `ValidationSource::Fraction(0.0)` gives all samples, in file order, to `train`. `tokenizer` may be `None` for the
/// format `tokens` with labels given as token ids. With a rule for the `initial` part of prompts, each sequence says where it stands.
pub fn open(
    recipe: &DataRecipe,
    head: &HeadRecipe,
    tokenizer: Option<&Tokenizer>,
    limits: ModelLimits,
    initial: Option<&InitialPart>,
    seed: u64,
) -> Result<Splits, DataError> {
    let mut opener = Opener::new(recipe, head, tokenizer, limits)?;
    opener.encoder.initial = initial.map(|rule| InitialPartFinder::new(rule, tokenizer)).transpose()?;
    let (samples, fitting, report) = opener.read(&recipe.train, SplitName::Train)?;
    let rest = samples.dropped(limits.max_positions);
    let rest = (!rest.is_empty()).then(|| Dataset::new(Arc::clone(&samples), rest));
    let mut files = vec![report];
    let (train, validation) = match &recipe.validation {
        ValidationSource::Fraction(fraction) => {
            let (train, validation) = split(&fitting, *fraction, seed);
            let validation = (!validation.is_empty()).then(|| Dataset::new(Arc::clone(&samples), validation));
            (Dataset::new(samples, train), validation)
        }
        ValidationSource::File(paths) => {
            let (held_out, held_out_fitting, report) = opener.read(paths, SplitName::Validation)?;
            files.push(report);
            (Dataset::new(samples, fitting), Some(Dataset::new(held_out, held_out_fitting)))
        }
    };
    let report = LoadReport { files, train: train.len(), validation: validation.as_ref().map_or(0, Dataset::len) };
    Ok(Splits { train, validation, rest, report })
}

pub(super) struct Opener<'a> {
    pub(super) recipe: &'a DataRecipe,
    pub(super) task: Task,
    pub(super) encoder: Encoder,
    pub(super) limit: usize,
}

impl<'a> Opener<'a> {
    pub(super) fn new(
        recipe: &'a DataRecipe,
        head: &HeadRecipe,
        tokenizer: Option<&Tokenizer>,
        limits: ModelLimits,
    ) -> Result<Self, DataError> {
        let task = match head {
            HeadRecipe::NextToken => Task::NextToken,
            HeadRecipe::SeqClassificationOnLogits(labels) => Task::Classify(Classes::new(labels, tokenizer)?),
            HeadRecipe::SeqClassification(classes) => Task::Classify(Classes::scored(classes)),
        };
        if let Task::Classify(classes) = &task {
            let outside = classes.tokens.iter().find(|&&token| token as usize >= limits.vocab_size);
            if let Some(&token) = outside {
                let what = "a label of the head".to_owned();
                return Err(DataError::OutOfVocabulary { what, id: u64::from(token), vocab_size: limits.vocab_size });
            }
        }
        let encoder = Encoder {
            tokenizer: tokenizer.cloned(),
            trains_on_prompt: recipe.train_on_prompt,
            vocab_size: limits.vocab_size,
            initial: None,
        };
        let limit = recipe.max_seq_length.unwrap_or(usize::MAX).min(limits.max_positions);
        Ok(Self { recipe, task, encoder, limit })
    }

    /// One split's samples, the indices of those that fit, and what happened to the others.
    fn read(&self, paths: &DataPaths, split: SplitName) -> Result<(Arc<Samples>, Vec<usize>, FileReport), DataError> {
        let source = DataSource::find(self.recipe, paths, split)?;
        let format = source.format;
        let reader =
            ExampleReader::new(self.recipe, format, &self.task, self.encoder.tokenizer.as_ref(), self.encoder.vocab_size)?;
        let mut bad = BadRows::new(self.recipe.on_bad_row);
        let mut examples = Vec::new();
        each_example(&source.files, &source.rows, &reader, &mut bad, &mut |example| {
            examples.push(example);
            Ok(())
        })?;
        let read = bad.read();
        let (bad, first_bad) = bad.finish()?;
        let path = source.files.first().cloned().unwrap_or_default();
        if examples.is_empty() {
            return Err(first_bad.into_iter().next().unwrap_or(DataError::Empty { path }));
        }
        let mut report = FileReport {
            path,
            files: source.files.len(),
            read,
            bad,
            limit: self.limit,
            dropped: 0,
            uncuttable: 0,
            cut: 0,
            longest: 0,
            lengths: LengthSource::Given,
            cache_problem: None,
            format: source.told.clone(),
            notes: source.notes.clone(),
        };
        let hash = hash_of(&source.files)?;
        let lengths = self.lengths(&reader, &hash, &examples, &mut report)?;
        report.longest = lengths.iter().map(|length| length.total).max().unwrap_or(0);
        let mut fits = Vec::with_capacity(lengths.len());
        let mut fitting = Vec::new();
        for (index, (&length, example)) in lengths.iter().zip(&examples).enumerate() {
            let fit = fit(length, self.limit, self.recipe.on_too_long, || example.place.clone())?;
            report.cut += usize::from(matches!(fit, Fit::Cut(_)));
            report.uncuttable += usize::from(fit == Fit::NothingToCut);
            match fit {
                Fit::Whole | Fit::Cut(_) => fitting.push(index),
                Fit::Dropped | Fit::NothingToCut => report.dropped += 1,
            }
            fits.push(fit);
        }
        if fitting.is_empty() {
            let shortest = lengths.iter().map(|length| length.total).min().unwrap_or(0);
            return Err(DataError::NothingFits { path: report.path, read: report.read, limit: self.limit, shortest });
        }
        let (encoder, opening) = (self.encoder.clone(), reader.opening());
        let samples = Samples { path: report.path.clone(), hash, format, examples, lengths, fits, encoder, opening };
        Ok((Arc::new(samples), fitting, report))
    }

    /// Lengths of all samples: counted only where no valid record of an earlier start is found.
    fn lengths(
        &self,
        reader: &ExampleReader<'_>,
        hash: &str,
        examples: &[Example],
        report: &mut FileReport,
    ) -> Result<Vec<Length>, DataError> {
        let count = |example: &Example| Ok(self.encoder.encode(&example.content, &|| example.place.clone())?.length());
        let Some(tokenizer) = self.encoder.tokenizer.as_ref().filter(|_| reader.format != DataFormat::Tokens) else {
            return examples.iter().map(count).collect();
        };
        let kind = files::hash_bytes(reader.identity().as_bytes());
        let key = Key { data_hash: hash.to_owned(), tokenizer_hash: tokenizer.hash().to_owned(), kind };
        let places = length_cache::places(&report.path, hash);
        if let Some(lengths) = length_cache::read(&places, &key, examples.len()) {
            report.lengths = LengthSource::Cached;
            return Ok(lengths);
        }
        let lengths = on_all_cores(examples, count)?;
        report.lengths = LengthSource::Counted;
        report.cache_problem = length_cache::write(&places, &key, &lengths).err();
        Ok(lengths)
    }
}

/// Of the content of files; of one alone, that of its bytes.
fn hash_of(files: &[PathBuf]) -> Result<String, DataError> {
    let hashes = files.iter().map(|file| files::hash_file(file)).collect::<Result<Vec<_>, _>>()?;
    Ok(if let [hash] = &hashes[..] { hash.clone() } else { files::hash_bytes(hashes.concat().as_bytes()) })
}

/// Maps `work` over the examples on all cores, in order; of several errors the one of the earliest example.
fn on_all_cores<T: Send>(
    examples: &[Example],
    work: impl Fn(&Example) -> Result<T, DataError> + Sync,
) -> Result<Vec<T>, DataError> {
    let next = AtomicUsize::new(0);
    let has_failed = AtomicBool::new(false);
    let worker = || {
        let mut done = Vec::new();
        while !has_failed.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(example) = examples.get(index) else { break };
            let result = work(example);
            has_failed.fetch_or(result.is_err(), Ordering::Relaxed);
            done.push((index, result));
        }
        done
    };
    let num_threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(examples.len());
    let mut results = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..num_threads).map(|_| scope.spawn(worker)).collect();
        let joined = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        joined.flatten().collect::<Vec<_>>()
    });
    results.sort_by_key(|&(index, _)| index);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::fixtures::{Fixture, LIMITS, tokenizer};
    use crate::data::{IGNORE, Targets};
    use crate::recipe::{Labels, OnTooLong};

    fn texts(number: usize) -> String {
        let line = |index: usize| format!("{{\"prompt\": \"{}\", \"completion\": \"yes\"}}\n", "word ".repeat(index + 1));
        (0..number).map(line).collect()
    }

    #[test]
    fn the_second_start_does_not_tokenise() {
        let fixture = Fixture::new(DataFormat::PromptCompletion, texts(9));
        let first = fixture.open().unwrap();
        assert_eq!(first.report.files[0].lengths, LengthSource::Counted);
        let second = fixture.open().unwrap();
        assert_eq!(second.report.files[0].lengths, LengthSource::Cached);
        assert_eq!(second.train.lengths(), first.train.lengths());
        // Another head has other prompts, another content another hash.
        let third = Fixture { head: crate::data::fixtures::letters(), ..fixture };
        assert!(third.error().contains("expected one of the labels"));
        third.write("train.jsonl", texts(8).replace("yes", "A"));
        assert_eq!(third.open().unwrap().report.files[0].lengths, LengthSource::Counted);
        assert_eq!(third.open().unwrap().report.files[0].lengths, LengthSource::Cached);
    }

    #[test]
    fn a_record_that_lies_is_found_out() {
        let fixture = Fixture::new(DataFormat::PromptCompletion, texts(1));
        let length = fixture.open().unwrap().train.lengths()[0];
        let cache = fixture.dir.path().join("train.jsonl.lengths.json");
        let text = std::fs::read_to_string(&cache).unwrap();
        std::fs::write(&cache, text.replace(&format!("[[{},", length + 1), "[[99,")).unwrap();
        let splits = fixture.open().unwrap();
        assert_eq!(splits.train.lengths(), [98]);
        assert!(matches!(splits.train.batch(&[0]), Err(DataError::LengthChanged { recorded: 99, .. })));
    }

    #[test]
    fn too_long_samples_are_dropped_cut_or_refused() {
        let fixture = Fixture::new(DataFormat::PromptCompletion, texts(30));
        let whole = fixture.open().unwrap().train;
        let limit = whole.lengths()[20] + 1;
        let drop = fixture.limit(limit, OnTooLong::Drop);
        let dropped = drop.open().unwrap();
        assert_eq!((dropped.train.len(), dropped.report.files[0].dropped), (21, 9));
        let rest = dropped.rest.unwrap();
        let whole_rest = whole.batch(&(21..30).collect::<Vec<_>>()).unwrap();
        assert_eq!(rest.batch(&(0..9).collect::<Vec<_>>()).unwrap(), whole_rest);
        assert_eq!(rest.first(2).batch(&[0, 1]).unwrap().sequences, whole_rest.sequences[..2]);
        let cut = drop.limit(limit, OnTooLong::Truncate);
        let splits = cut.open().unwrap();
        assert_eq!((splits.train.len(), splits.report.files[0].cut), (30, 9));
        assert_eq!(splits.train.lengths()[29], limit - 1);
        let (long, short) =
            (whole.batch(&[29]).unwrap().sequences.swap_remove(0), splits.train.batch(&[29]).unwrap().sequences.swap_remove(0));
        assert_eq!(short.inputs.len(), limit - 1);
        // The cut lies in the middle of the prompt: both ends stay, and the completion with its targets.
        let (front, back) = (short.inputs.len() / 3, short.inputs.len() / 2);
        assert_eq!(short.inputs[..front], long.inputs[..front]);
        assert_eq!(short.inputs[back + 2..], long.inputs[long.inputs.len() - (short.inputs.len() - back - 2)..]);
        let trained = |targets: &Targets| match targets {
            Targets::NextToken(targets) => targets.iter().copied().filter(|&target| target != IGNORE).collect::<Vec<_>>(),
            Targets::Class(_) => Vec::new(),
        };
        assert_eq!(trained(&short.targets), trained(&long.targets));
        let refused = cut.limit(limit, OnTooLong::Error);
        let length = whole.lengths()[21] + 1;
        assert_eq!(refused.error(), format!("`train.jsonl:22`: {length} tokens, expected at most {limit}"));
        let nothing = refused.limit(2, OnTooLong::Drop);
        assert!(nothing.error().starts_with("none of the 30 samples of `train.jsonl` fits into 2 tokens, the shortest has "));
        let uncuttable = nothing.limit(2, OnTooLong::Truncate);
        assert!(matches!(uncuttable.open(), Err(DataError::NothingFits { .. })));
    }

    #[test]
    fn the_models_positions_limit_too() {
        let fixture = Fixture::new(DataFormat::Tokens, "{\"input_ids\": [1, 2, 3, 4], \"labels\": [1, 2, 3, 4]}\n");
        let open = |max_positions| open(&fixture.recipe, &fixture.head, None, ModelLimits { max_positions, ..LIMITS }, None, 1);
        assert!(open(4).is_ok());
        assert!(matches!(open(3), Err(DataError::TooLong { length: 4, limit: 3, .. })));
    }

    #[test]
    fn splits_by_seed_or_by_file() {
        let mut fixture = Fixture::new(DataFormat::PromptCompletion, texts(20));
        fixture.recipe.validation = ValidationSource::Fraction(0.25);
        let splits = fixture.open().unwrap();
        let validation = splits.validation.unwrap();
        assert_eq!((splits.train.len(), validation.len(), splits.report.validation), (15, 5, 5));
        let samples = |dataset: &Dataset| {
            let all: Vec<usize> = (0..dataset.len()).collect();
            dataset.batch(&all).unwrap().sequences.iter().map(|sequence| sequence.sample).collect::<Vec<_>>()
        };
        let mut all = [samples(&splits.train), samples(&validation)].concat();
        all.sort_unstable();
        assert_eq!(all, (0..20).collect::<Vec<_>>());
        fixture.recipe.validation = ValidationSource::File(fixture.write("held_out.jsonl", texts(3)).into());
        let splits = fixture.open().unwrap();
        assert_eq!((splits.train.len(), splits.validation.unwrap().len(), splits.report.files.len()), (20, 3, 2));
        fixture.recipe.validation = ValidationSource::File(fixture.write("held_out.jsonl", "").into());
        assert_eq!(fixture.error(), "`held_out.jsonl` holds no samples, expected at least 1");
    }

    #[test]
    fn a_batch_of_nothing_is_an_error() {
        let train = Fixture::new(DataFormat::PromptCompletion, texts(2)).open().unwrap().train;
        assert_eq!(train.batch(&[]).unwrap_err().to_string(), "a batch of no samples, expected sample indices below 2");
        assert_eq!(train.batch(&[0, 2]).unwrap_err().to_string(), "a batch of sample 2, expected sample indices below 2");
    }

    #[test]
    fn text_needs_a_tokenizer_that_fits_the_model() {
        let fixture = Fixture::new(DataFormat::PromptCompletion, texts(2));
        let error = open(&fixture.recipe, &fixture.head, None, LIMITS, None, 1).unwrap_err();
        assert_eq!(error.to_string(), "text data needs a tokenizer, found none");
        let small = ModelLimits { vocab_size: 40, ..LIMITS };
        let error = open(&fixture.recipe, &fixture.head, Some(&tokenizer()), small, None, 1).unwrap_err();
        assert!(matches!(error, DataError::OutOfVocabulary { vocab_size: 40, .. }), "{error}");
        let labels = HeadRecipe::SeqClassificationOnLogits(Labels::Texts(vec!["yes".into(), "two words".into()]));
        let error = open(&fixture.recipe, &labels, Some(&tokenizer()), LIMITS, None, 1).unwrap_err();
        assert!(matches!(error, DataError::LabelTokens { .. }), "{error}");
        let mut missing = fixture.recipe.clone();
        missing.train = "no/such/file".into();
        let error = open(&missing, &fixture.head, Some(&tokenizer()), LIMITS, None, 1).unwrap_err();
        assert_eq!(error.to_string(), "cannot read `no/such/file`");
    }
}
