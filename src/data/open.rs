//! The door of the room: from the recipe's `data` table to data sets ready to be batched.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde_json::json;

use super::bad_rows::BadRows;
use super::chat::ChatEncoder;
use super::dataset::{Dataset, Piece, Samples};
use super::encode::Encoder;
use super::encoded_rows::each_row;
use super::faults::{self, RowFault};
use super::formats::ExampleReader;
use super::initial_part::InitialPartFinder;
use super::label_tokens::Classes;
use super::load_report::FileReport;
use super::on_too_long::{LengthCounts, LengthOutcome, check_windows};
use super::rows::SplitName;
use super::sets::{Splits, joined};
use super::source::DataSource;
use super::split::split;
use super::token_cache::{self, TokenRecord, hashes_of};
use super::token_file::{About, TokenWriter};
use super::tokenizer::Tokenizer;
use crate::recipe::{DataPaths, DataRecipe, HeadRecipe, InitialPart, ValidationSource};
use crate::units::Fault;

/// A data set to be opened or looked at, and what its samples become tokens for.
#[derive(Clone, Copy, Debug)]
pub struct DataRequest<'a> {
    pub recipe: &'a DataRecipe,
    pub head: &'a HeadRecipe,
    /// `None` is enough for the format `tokens` with labels given as token ids.
    pub tokenizer: Option<&'a Tokenizer>,
    pub limits: ModelLimits,
    /// The rule for the initial part of prompts: with one, each sequence says where its own stands.
    pub initial: Option<&'a InitialPart>,
    pub seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelLimits {
    /// Rows of its embedding: token ids are below this.
    pub vocab_size: usize,
    /// Longest sequence it was made for: the limit where a recipe has none.
    pub trained_positions: usize,
    /// Longest sequence that it computes.
    pub computable_positions: usize,
    /// What pads texts: a model that scores classes reads the last token that is another one.
    pub pad: Option<u32>,
}

/// Is told how far the tokenising is, several times a second: the first file, the samples so far, and their tokens.
pub type Watch<'a> = &'a mut dyn FnMut(&Path, usize, usize);

/// Reads the recipe's files, finds the samples that fit, and splits them by the seed where there is no validation file.
///
/// With `ValidationSource::Fraction(0.0)` all are in `train`, in file order. `watch` hears nothing where an earlier start has left the tokens.
pub fn open(request: &DataRequest<'_>, watch: Watch<'_>) -> Result<Splits, Fault> {
    let recipe = request.recipe;
    let mut splits = if recipe.sets.is_empty() {
        open_set(request, watch)?
    } else {
        let mut opened = Vec::with_capacity(recipe.sets.len());
        for set in &recipe.sets {
            opened.push((set, open_set(&DataRequest { recipe: &set.data, ..*request }, watch)?));
        }
        joined(opened, recipe.chat.chat_template_date, request.seed)?
    };
    splits.shared = splits.validation.as_ref().map_or(0, |held_out| held_out.shared_with(&splits.train));
    Ok(splits)
}

fn open_set(request: &DataRequest<'_>, watch: Watch<'_>) -> Result<Splits, Fault> {
    let DataRequest { recipe, limits, initial, seed, .. } = *request;
    let opener = Opener::new(request)?;
    let (samples, pieces, report) = opener.read(&recipe.train, SplitName::Train, watch)?;
    let rest = samples.dropped(&pieces, limits.trained_positions);
    let rest = (!rest.is_empty()).then(|| Dataset::new(Arc::clone(&samples), rest));
    let mut files = vec![report];
    let (train, validation) = match &recipe.validation {
        ValidationSource::Fraction(fraction) => {
            let (train, validation) = split(pieces, *fraction, seed);
            let validation = (!validation.is_empty()).then(|| Dataset::new(Arc::clone(&samples), validation));
            (Dataset::new(samples, train), validation)
        }
        ValidationSource::File(paths) => {
            let (held_out, held_out_pieces, report) = opener.read(paths, SplitName::Validation, watch)?;
            files.push(report);
            (Dataset::new(samples, pieces), Some(Dataset::new(held_out, held_out_pieces)))
        }
    };
    let mut notes = train.notes();
    // Two parts of one file have the same notes.
    if matches!(recipe.validation, ValidationSource::File(_)) {
        notes.add(validation.as_ref().map(Dataset::notes).unwrap_or_default());
    }
    let warnings = notes.warnings(opener.encoder.chat.recipe.train_on_end_of_turn);
    let has_texts = train.format().is_none_or(|format| format.has_texts) || initial.is_some();
    let origins = if has_texts { opener.encoder.origins(notes.has_conversations) } else { BTreeMap::new() };
    let encoder = &opener.encoder.chat;
    let chat_template_date = if notes.has_conversations { &encoder.recipe } else { &recipe.chat }.chat_template_date;
    Ok(Splits { train, validation, rest, files, shared: 0, warnings, origins, chat_template_date })
}

pub(super) struct Opener<'a> {
    pub(super) recipe: &'a DataRecipe,
    classes: Option<Classes>,
    pub(super) encoder: Encoder,
    pub(super) limit: usize,
}

impl<'a> Opener<'a> {
    pub(super) fn new(request: &DataRequest<'a>) -> Result<Self, Fault> {
        let DataRequest { recipe, head, tokenizer, limits, initial, .. } = *request;
        let classes = match head {
            HeadRecipe::NextToken => None,
            HeadRecipe::SeqClassificationOnLogits(labels) => Some(Classes::new(labels, tokenizer)?),
            HeadRecipe::SeqClassification(classes) => Some(Classes::scored(classes)),
        };
        if let Some(classes) = &classes {
            let outside = classes.tokens.iter().find(|&&token| token as usize >= limits.vocab_size);
            if let Some(&token) = outside {
                let message = faults::out_of_vocabulary("a label of the head", u64::from(token), limits.vocab_size);
                return Err(Fault::data(message, faults::OWN_TOKENIZER));
            }
        }
        let encoder = Encoder {
            tokenizer: tokenizer.cloned(),
            chat: ChatEncoder::new(recipe, tokenizer, chrono::Local::now().naive_local()),
            vocab_size: limits.vocab_size,
            pad: limits.pad.filter(|_| matches!(head, HeadRecipe::SeqClassification(_))),
            initial: initial.map(|rule| InitialPartFinder::new(rule, tokenizer)).transpose()?,
        };
        let limit = recipe.max_seq_length.map_or(limits.trained_positions, |length| length.min(limits.computable_positions));
        check_windows(recipe, limit)?;
        Ok(Self { recipe, classes, encoder, limit })
    }

    /// One split's samples, those that are run, and what happened to the others.
    fn read(
        &self,
        paths: &DataPaths,
        split: SplitName,
        watch: Watch<'_>,
    ) -> Result<(Arc<Samples>, Vec<Piece>, FileReport), Fault> {
        let source = DataSource::find(self.recipe, paths, split)?;
        let reader = self.reader(&source)?;
        let key = self.token_key(&source, &reader);
        let tokens = token_cache::open(&token_cache::places(&source.files, &key), &source.files, key, |out, record| {
            self.tokenise(&source, &reader, out, record, &mut *watch)
        })?;
        let are_checked = (0..tokens.file.len).map(|_| AtomicBool::new(false)).collect();
        let samples = Samples { source, tokens, encoder: self.encoder.clone(), are_checked };
        let mut report = FileReport::new(&samples, self.limit);
        let pieces = self.pieces(&samples, &mut report.samples)?;
        Ok((Arc::new(samples), pieces, report))
    }

    pub(super) fn reader(&self, source: &DataSource) -> Result<ExampleReader<'_>, Fault> {
        ExampleReader::new(self.recipe, source.format, self.classes.as_ref(), &self.encoder)
    }

    /// What is run of samples, and the counts of it.
    fn pieces(&self, samples: &Samples, counts: &mut LengthCounts) -> Result<Vec<Piece>, Fault> {
        let file = &samples.tokens.file;
        let mut pieces = Vec::with_capacity(file.len);
        for sample in 0..file.len {
            let length = file.length(sample);
            let outcome = LengthOutcome::of(self.recipe, self.limit, length, || samples.place(sample))?;
            pieces.extend(Piece::of(sample, &outcome, length.total));
            counts.add(length.total, &outcome);
        }
        if pieces.is_empty() {
            let shortest = counts.shortest.unwrap_or(0);
            return Err(faults::nothing_fits(samples.source.first(), file.len, self.limit, shortest));
        }
        Ok(pieces)
    }

    /// All that decides ids and targets, key by key; what decides what becomes of the tokens later is left out.
    fn token_key(&self, source: &DataSource, reader: &ExampleReader<'_>) -> String {
        let DataRecipe { on_bad_row, max_line_bytes, .. } = self.recipe;
        let key = json!({
            "columns": source.rows.columns, "on_bad_row": on_bad_row.name(), "max_line_bytes": max_line_bytes,
            "rows": reader.identity(), "tokens": self.encoder.identity(source.format().has_messages),
        });
        key.to_string()
    }

    fn tokenise(
        &self,
        source: &DataSource,
        reader: &ExampleReader<'_>,
        out: &mut dyn Write,
        mut record: TokenRecord,
        watch: Watch<'_>,
    ) -> io::Result<()> {
        let path = source.first();
        let indices: HashMap<&Path, usize> =
            source.files.iter().enumerate().map(|(index, path)| (path.as_path(), index)).collect();
        let mut writer = TokenWriter::new(out)?;
        let (mut samples, mut num_tokens) = (0, 0);
        let mut bad = BadRows::new(self.recipe.on_bad_row);
        each_row(source, reader, |row| {
            let (example, mut tokens) = match row.sample {
                Ok(sample) => sample,
                Err(error) if error.payload::<RowFault>().is_some_and(|row| !row.is_too_long) => {
                    bad.note(error);
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            };
            bad.read += 1;
            let file = indices.get(&*row.place.path).copied().unwrap_or(0);
            let border = tokens.border.take();
            writer.push(&tokens, &About::of(example, file, row.place.at, border))?;
            samples += 1;
            num_tokens += tokens.ids.len();
            watch(path, samples, num_tokens);
            Ok::<_, io::Error>(())
        })?;
        let count = bad.count;
        bad.finish(path)?;
        (record.read, record.bad) = (samples, count);
        record.notes = self.encoder.chat.take_notes();
        record.hashes = hashes_of(&source.files)?;
        writer.finish(&record)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::data::faults::RowFault;
    use crate::data::fixtures::{Fixture, LIMITS, tokenizer};
    use crate::data::{IGNORE, Targets};
    use crate::recipe::{ClassList, OnTooLong};

    fn texts(number: usize) -> String {
        let line = |index: usize| format!("{{\"prompt\": \"{}\", \"completion\": \"yes\"}}\n", "word ".repeat(index + 1));
        (0..number).map(line).collect()
    }

    #[test]
    fn the_second_start_does_not_tokenise() {
        let fixture = Fixture::new("prompt-completion", texts(9));
        let first = fixture.open().unwrap();
        assert_eq!(first.files[0].origin, "tokenised now");
        let second = fixture.open().unwrap();
        assert_eq!(second.files[0].origin, "tokenised before");
        assert_eq!(second.train.lengths(), first.train.lengths());
        // Another head has other prompts, another content another hash.
        let third = Fixture { head: crate::data::fixtures::letters(), ..fixture };
        assert!(third.error().contains("expected one of the labels"));
        third.write("train.jsonl", texts(8).replace("yes", "A"));
        assert_eq!(third.open().unwrap().files[0].origin, "tokenised now");
        assert_eq!(third.open().unwrap().files[0].origin, "tokenised before");
    }

    #[test]
    fn damaged_tokens_are_found_out() {
        let fixture = Fixture::new("prompt-completion", texts(1));
        let length = fixture.open().unwrap().train.lengths()[0];
        let folder = fixture.dir.path().join("train.jsonl.tokens");
        let cache = std::fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
        let mut bytes = std::fs::read(&cache).unwrap();
        let id = tokenizer().encode("word").unwrap()[0].to_le_bytes();
        let at = bytes.windows(8).position(|window| window[..4] == id).unwrap();
        bytes[at] ^= 1;
        std::fs::write(&cache, bytes).unwrap();
        let splits = fixture.open().unwrap();
        assert_eq!(splits.train.lengths(), [length]);
        let error = splits.train.batch(&[0]).unwrap_err().to_string();
        assert!(error.ends_with("train.jsonl:1`: its tokens in the cache are damaged"), "{error}");
    }

    #[test]
    fn other_settings_make_other_tokens() {
        let mut fixture = Fixture::new("prompt-completion", texts(2));
        let trained = |fixture: &Fixture| fixture.open().unwrap().train.batch(&[0]).unwrap().num_targets();
        let completion = trained(&fixture);
        fixture.recipe.train_on_prompt = true;
        let all = trained(&fixture);
        assert!(all > completion);
        fixture.recipe.train_on_prompt = false;
        assert_eq!(trained(&fixture), completion);
        // What decides what becomes of the tokens makes none.
        let other = fixture.limit(40, OnTooLong::Drop);
        assert_eq!(other.open().unwrap().files[0].origin, "tokenised before");
    }

    /// Sequences of plain text of these lengths; the tokens tell the samples apart, where `kinds` says so.
    fn plain(lengths: &[(usize, u32)]) -> String {
        let line = |&(length, kind): &(usize, u32)| {
            let ids: Vec<u32> = (0..length as u32).map(|at| (kind + 7 * at) % 512).collect();
            format!("{}\n", serde_json::json!({"input_ids": ids, "labels": ids}))
        };
        lengths.iter().map(line).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn nothing_is_skipped_doubled_or_cut_without_a_word(
            lengths in prop::collection::vec((2_usize..60, 0_u32..4), 1..12), limit in 4_usize..50, overlap in 0_usize..2,
            on_too_long in prop::sample::select(OnTooLong::ALL), fraction in prop_oneof![Just(0.0), 0.1..0.9_f64],
        ) {
            let mut fixture = Fixture::new("tokens", plain(&lengths)).limit(limit, on_too_long);
            fixture.recipe.validation = ValidationSource::Fraction(fraction);
            fixture.recipe.split_overlap = if on_too_long == OnTooLong::Split { overlap } else { 0 };
            let too_long = lengths.iter().filter(|(length, _)| *length > limit).count();
            let splits = match fixture.open() {
                Ok(splits) => splits,
                Err(error) if error.payload::<RowFault>().is_some_and(|row| row.is_too_long) => {
                    prop_assert!(on_too_long == OnTooLong::Error && too_long > 0);
                    return Ok(());
                }
                Err(error) => {
                    prop_assert!(error.to_string().starts_with("none of the"), "{}", error);
                    // Of plain text nothing may be cut out.
                    prop_assert!(too_long == lengths.len() && matches!(on_too_long, OnTooLong::Drop | OnTooLong::Truncate));
                    return Ok(());
                }
            };
            let file = &splits.files[0];
            let held_out = splits.validation.as_ref().map_or(0, Dataset::len);
            prop_assert_eq!((file.rows, file.bad), (lengths.len(), 0));
            prop_assert_eq!(file.samples.used() + file.samples.left_out() + file.bad, file.rows);
            let dropped = if on_too_long == OnTooLong::Split { 0 } else { too_long };
            prop_assert_eq!((file.samples.left_out(), file.samples.split), (dropped, too_long - dropped));
            prop_assert_eq!(splits.train.len() + held_out, file.samples.used() - file.samples.split + file.samples.windows);
            let distinct: std::collections::BTreeSet<_> = lengths.iter().collect();
            prop_assert_eq!(file.duplicates, lengths.len() - distinct.len());
            prop_assert_eq!(splits.rest.as_ref().map_or(0, Dataset::len), dropped);
            // Every token of every sample that is kept but the first is a target, and is one once, on one side.
            let mut targets: Vec<Vec<u32>> = vec![Vec::new(); lengths.len()];
            let mut sides: Vec<Vec<usize>> = vec![Vec::new(); lengths.len()];
            for (side, dataset) in [Some(&splits.train), splits.validation.as_ref()].into_iter().flatten().enumerate() {
                for index in 0..dataset.len() {
                    let sequence = dataset.batch(&[index]).unwrap().sequences.swap_remove(0);
                    prop_assert!(sequence.inputs.len() < limit.max(2) && sequence.inputs.len() == dataset.lengths()[index]);
                    let Targets::NextToken(found) = sequence.targets else { panic!("a class") };
                    let trained = found.iter().filter(|&&target| target != IGNORE).map(|&target| target as u32);
                    targets[sequence.sample as usize].extend(trained);
                    sides[sequence.sample as usize].push(side);
                }
            }
            for ((length, kind), (targets, sides)) in lengths.iter().zip(targets.iter().zip(&mut sides)) {
                let expected: Vec<u32> = (1..*length as u32).map(|at| (kind + 7 * at) % 512).collect();
                prop_assert!(targets.is_empty() && dropped > 0 && *length > limit || *targets == expected);
                sides.dedup();
                prop_assert!(sides.len() <= 1);
            }
        }
    }

    #[test]
    fn only_plain_text_becomes_windows() {
        let fixture = Fixture::new("prompt-completion", texts(30)).limit(20, OnTooLong::Split);
        assert!(
            fixture.error().ends_with("or a text all of whose tokens are targets, which can be split"),
            "{}",
            fixture.error()
        );
        let mut overlapping = Fixture::new("tokens", plain(&[(30, 0)])).limit(5, OnTooLong::Split);
        overlapping.recipe.split_overlap = 4;
        assert_eq!(overlapping.error(), "windows of 5 tokens cannot share 4: expected at most 3");
    }

    #[test]
    fn too_long_samples_are_dropped_cut_or_refused() {
        let fixture = Fixture::new("prompt-completion", texts(30));
        let whole = fixture.open().unwrap().train;
        let limit = whole.lengths()[20] + 1;
        let drop = fixture.limit(limit, OnTooLong::Drop);
        let dropped = drop.open().unwrap();
        assert_eq!((dropped.train.len(), dropped.files[0].samples.left_out()), (21, 9));
        let rest = dropped.rest.unwrap();
        let whole_rest = whole.batch(&(21..30).collect::<Vec<_>>()).unwrap();
        assert_eq!(rest.batch(&(0..9).collect::<Vec<_>>()).unwrap(), whole_rest);
        assert_eq!(rest.first(2).batch(&[0, 1]).unwrap().sequences, whole_rest.sequences[..2]);
        let cut = drop.limit(limit, OnTooLong::Truncate);
        let splits = cut.open().unwrap();
        assert_eq!((splits.train.len(), splits.files[0].samples.cut), (30, 9));
        assert_eq!(splits.train.lengths()[29], limit - 1);
        let (long, short) =
            (whole.batch(&[29]).unwrap().sequences.swap_remove(0), splits.train.batch(&[29]).unwrap().sequences.swap_remove(0));
        assert_eq!(short.inputs.len(), limit - 1);
        // The cut lies in the middle of the prompt: both ends stay, and the completion with its targets.
        let (front, back) = (short.inputs.len() / 3, short.inputs.len() / 2);
        assert_eq!(short.inputs[..front], long.inputs[..front]);
        assert_eq!(short.inputs[back + 2..], long.inputs[long.inputs.len() - (short.inputs.len() - back - 2)..]);
        let trained = |targets: &Targets| -> Vec<i64> {
            targets.labels().into_iter().flatten().copied().filter(|&label| label != IGNORE).collect()
        };
        assert_eq!(trained(&short.targets), trained(&long.targets));
        let refused = cut.limit(limit, OnTooLong::Error);
        let length = whole.lengths()[21] + 1;
        assert_eq!(refused.error(), format!("`train.jsonl:22`: {length} tokens, expected at most {limit}"));
        let nothing = refused.limit(2, OnTooLong::Drop);
        assert!(nothing.error().starts_with("none of the 30 samples of `train.jsonl` fits into 2 tokens, the shortest has "));
        let uncuttable = nothing.limit(2, OnTooLong::Truncate);
        assert!(uncuttable.error().starts_with("none of the 30 samples"));
    }

    #[test]
    fn the_models_positions_limit_too() {
        let fixture = Fixture::new("tokens", "{\"input_ids\": [1, 2, 3, 4], \"labels\": [1, 2, 3, 4]}\n");
        let open = |trained_positions| {
            let limits = ModelLimits { trained_positions, computable_positions: trained_positions, ..LIMITS };
            open(&DataRequest { limits, ..fixture.request(None) }, &mut |_, _, _| {})
        };
        assert!(open(4).is_ok());
        assert!(open(3).unwrap_err().to_string().ends_with("4 tokens, expected at most 3"));
    }

    #[test]
    fn splits_by_seed_or_by_file() {
        let mut fixture = Fixture::new("prompt-completion", texts(20));
        fixture.recipe.validation = ValidationSource::Fraction(0.25);
        let splits = fixture.open().unwrap();
        let validation = splits.validation.unwrap();
        assert_eq!((splits.train.len(), validation.len()), (15, 5));
        let samples = |dataset: &Dataset| {
            let all: Vec<usize> = (0..dataset.len()).collect();
            dataset.batch(&all).unwrap().sequences.iter().map(|sequence| sequence.sample).collect::<Vec<_>>()
        };
        let mut all = [samples(&splits.train), samples(&validation)].concat();
        all.sort_unstable();
        assert_eq!(all, (0..20).collect::<Vec<_>>());
        fixture.recipe.validation = ValidationSource::File(fixture.write("held_out.jsonl", texts(3)).into());
        let splits = fixture.open().unwrap();
        assert_eq!((splits.train.len(), splits.validation.unwrap().len(), splits.files.len()), (20, 3, 2));
        fixture.recipe.validation = ValidationSource::File(fixture.write("held_out.jsonl", "").into());
        assert_eq!(fixture.error(), "`held_out.jsonl` holds no samples, expected at least 1");
    }

    #[test]
    fn a_batch_of_nothing_is_an_error() {
        let train = Fixture::new("prompt-completion", texts(2)).open().unwrap().train;
        assert_eq!(train.batch(&[]).unwrap_err().to_string(), "a batch of no samples, expected sample indices below 2");
        assert_eq!(train.batch(&[0, 2]).unwrap_err().to_string(), "a batch of sample 2, expected sample indices below 2");
    }

    #[test]
    fn text_needs_a_tokenizer_that_fits_the_model() {
        let fixture = Fixture::new("prompt-completion", texts(2));
        let error = open(&fixture.request(None), &mut |_, _, _| {}).unwrap_err();
        assert_eq!(error.to_string(), "text data needs a tokenizer, and the model has no `tokenizer.json`");
        let small = ModelLimits { vocab_size: 40, ..LIMITS };
        let one = Fixture::new("prompt-completion", texts(1));
        let error = open(&DataRequest { limits: small, ..one.request(Some(&tokenizer())) }, &mut |_, _, _| {}).unwrap_err();
        assert!(error.to_string().ends_with("is not below the model's `vocab_size` 40"), "{error}");
        let labels = HeadRecipe::SeqClassificationOnLogits(ClassList::Named(vec!["yes".into(), "two words".into()]));
        let error = open(&DataRequest { head: &labels, ..fixture.request(Some(&tokenizer())) }, &mut |_, _, _| {}).unwrap_err();
        assert!(error.to_string().starts_with("label `yes` is 3 tokens"), "{error}");
        let mut missing = fixture.recipe.clone();
        missing.train = "no/such/file".into();
        let error =
            open(&DataRequest { recipe: &missing, ..fixture.request(Some(&tokenizer())) }, &mut |_, _, _| {}).unwrap_err();
        assert_eq!(error.to_string(), "cannot read `no/such/file`");
    }
}
