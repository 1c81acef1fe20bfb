//! A look at every row of the data files: what it says, which of its tokens are trained, and what becomes of it. Nothing is kept.

use super::error::DataError;
use super::formats::ExampleReader;
use super::on_too_long::{Fit, fit};
use super::open::{ModelLimits, Opener};
use super::rows::{self, DataRow, SplitName};
use super::sample_place::{LineOrRecord, SamplePlace};
use super::source::DataSource;
use super::tokenizer::Tokenizer;
use super::windows::windows;
use crate::recipe::{DataPaths, DataRecipe, HeadRecipe};

/// A row, and what becomes of it.
#[derive(Debug)]
pub struct SurveyedRow {
    /// Where it stands.
    pub place: SamplePlace,
    /// What it is, or why it is no sample.
    pub sample: Result<SurveyedSample, DataError>,
}

/// A row that is a sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SurveyedSample {
    /// What was tokenised; `None` of samples that are token ids already.
    pub text: Option<String>,
    /// Its tokens, without those that are cut out.
    pub ids: Vec<u32>,
    /// Whether each of them is a target.
    pub is_trained: Vec<bool>,
    /// Its class, where the head has classes: the only target.
    pub class: Option<usize>,
    /// Its tokens before anything was cut.
    pub length: usize,
    /// What becomes of it.
    pub fate: SampleFate,
}

/// What becomes of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleFate {
    /// It is used as it is.
    Whole,
    /// It is used, but for so many tokens.
    Cut(usize),
    /// It is used in so many windows.
    Split(usize),
    /// It is left out as too long.
    Dropped,
    /// It is left out as too long, and nothing of it may be cut.
    NothingToCut,
}

/// Hands over each row of some of a recipe's files, bad or not, whatever `data.on_bad_row` says.
///
/// # Errors
/// Files are missing or damaged, there is no sample among the first rows, or `sink` refuses.
pub fn survey<E: From<DataError>>(
    (recipe, head): (&DataRecipe, &HeadRecipe),
    tokenizer: Option<&Tokenizer>,
    limits: ModelLimits,
    (paths, is_training): (&DataPaths, bool),
    sink: &mut dyn FnMut(SurveyedRow) -> Result<(), E>,
) -> Result<DataSource, E> {
    let opener = Opener::new(recipe, head, tokenizer, limits)?;
    let split = if is_training { SplitName::Train } else { SplitName::Validation };
    let source = DataSource::find(recipe, paths, split)?;
    let reader = ExampleReader::new(recipe, source.format, &opener.task, tokenizer, limits.vocab_size)?;
    for file in &source.files {
        rows::each(file, &source.rows, &mut |row| {
            let whole = || SamplePlace { path: file.as_path().into(), at: LineOrRecord::Whole };
            let place = match &row {
                Ok(row) => row.place(),
                Err(error) => error.place().cloned().unwrap_or_else(whole),
            };
            let sample = row.and_then(|row| opener.surveyed(&reader, row));
            sink(SurveyedRow { place, sample })
        })?;
    }
    Ok(source)
}

impl Opener<'_> {
    fn surveyed(&self, reader: &ExampleReader<'_>, row: DataRow) -> Result<SurveyedSample, DataError> {
        let example = reader.example(row)?;
        let place = || example.place.clone();
        let mut sample = self.encoder.encode(&example.content, &place)?;
        let length = sample.length();
        let fate = match fit(length, self.limit.tokens, self.recipe.on_too_long, || Ok(place()))? {
            Fit::Whole => SampleFate::Whole,
            Fit::Dropped => SampleFate::Dropped,
            Fit::NothingToCut => SampleFate::NothingToCut,
            Fit::Split if !sample.is_plain_text() => {
                return Err(DataError::NoPlainText { place: place(), length: length.total, limit: self.limit.tokens });
            }
            Fit::Split => SampleFate::Split(windows(length.total, self.limit.tokens, self.limit.overlap).count()),
            Fit::Cut(range) => {
                let cut = range.len();
                sample.cut(range);
                SampleFate::Cut(cut)
            }
        };
        let text = self.encoder.source_text(&example.content, &place)?;
        let (ids, is_trained, class) = sample.into_parts();
        Ok(SurveyedSample { text, ids, is_trained, class, length: length.total, fate })
    }
}
