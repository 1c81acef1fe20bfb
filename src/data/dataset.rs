//! The samples of a split: their lengths at once, their tokens when a batch asks for them.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::batch::{Batch, Sequence};
use super::encode::{EncodedQuestion, EncodedSample, Encoder};
use super::error::DataError;
use super::example::{Content, Example};
use super::on_too_long::{Fit, Length};
use super::question::{Question, SampleGroups};
use crate::recipe::DataFormat;

/// Samples to train on or to validate with, in file order.
#[derive(Clone)]
pub struct Dataset {
    samples: Arc<Samples>,
    /// Indices of this split's samples in the file.
    chosen: Vec<usize>,
    lengths: Vec<usize>,
}

/// All samples of a file: two splits can share one.
pub(super) struct Samples {
    pub(super) path: PathBuf,
    pub(super) hash: String,
    pub(super) format: DataFormat,
    pub(super) examples: Vec<Example>,
    pub(super) lengths: Vec<Length>,
    pub(super) fits: Vec<Fit>,
    pub(super) encoder: Encoder,
    /// The end of each prompt that is the beginning of the reply.
    pub(super) opening: &'static str,
}

impl Dataset {
    pub(super) fn new(samples: Arc<Samples>, chosen: Vec<usize>) -> Self {
        let lengths = chosen.iter().map(|&index| samples.num_inputs(index)).collect();
        Self { samples, chosen, lengths }
    }

    /// Number of samples, at least one.
    pub fn len(&self) -> usize {
        self.chosen.len()
    }

    /// Never true for an opened data set; here because `len` is.
    pub fn is_empty(&self) -> bool {
        self.chosen.is_empty()
    }

    /// Tokens that are run, per sample.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Tokenises these samples (indices from 0 to `len` - 1) and cuts what is too long; sequence `i` is `samples[i]`.
    pub fn batch(&self, samples: &[usize]) -> Result<Batch, DataError> {
        let bad = |found: &dyn fmt::Display| DataError::BadBatch { found: found.to_string(), len: self.len() };
        if samples.is_empty() {
            return Err(bad(&"no samples"));
        }
        let sequence = |&sample: &usize| {
            let index = self.chosen.get(sample).ok_or_else(|| bad(&format_args!("sample {sample}")))?;
            self.samples.row(*index)
        };
        Ok(Batch { sequences: samples.iter().map(sequence).collect::<Result<_, _>>()? })
    }

    /// The prompt of a sample, and its answer as text.
    pub fn question(&self, sample: usize) -> Result<Question, DataError> {
        let index =
            self.chosen.get(sample).ok_or_else(|| DataError::BadBatch { found: format!("sample {sample}"), len: self.len() })?;
        self.samples.question(*index)
    }

    /// What a sample is reported under, where its file says.
    pub fn groups(&self, sample: usize) -> Option<&SampleGroups> {
        self.samples.examples[*self.chosen.get(sample)?].groups.as_ref()
    }

    /// The first samples alone, in file order; all, where there are not as many.
    pub fn first(mut self, count: usize) -> Self {
        self.chosen.truncate(count);
        self.lengths.truncate(count);
        self
    }

    /// The file which the samples come from.
    pub fn path(&self) -> &Path {
        &self.samples.path
    }

    /// What the files hold.
    pub fn format(&self) -> DataFormat {
        self.samples.format
    }

    /// Hash of that file's content: a resumed run must find the same.
    pub fn hash(&self) -> &str {
        &self.samples.hash
    }
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dataset").field("path", &self.samples.path).field("len", &self.len()).finish_non_exhaustive()
    }
}

impl Samples {
    fn num_inputs(&self, index: usize) -> usize {
        let cut = if let Fit::Cut(range) = &self.fits[index] { range.len() } else { 0 };
        let is_classified = matches!(self.examples[index].content, Content::TextClass { .. } | Content::TokensClass { .. });
        self.lengths[index].total - cut - usize::from(!is_classified)
    }

    /// The samples that are left out as too long, but for those of more than `most` tokens.
    pub(super) fn dropped(&self, most: usize) -> Vec<usize> {
        let is_dropped = |index: &usize| self.fits[*index] == Fit::Dropped && self.lengths[*index].total <= most;
        (0..self.examples.len()).filter(is_dropped).collect()
    }

    fn row(&self, index: usize) -> Result<Sequence, DataError> {
        Ok(self.encoded(index)?.into_sequence(index))
    }

    fn question(&self, index: usize) -> Result<Question, DataError> {
        let example = &self.examples[index];
        let place = || example.place.clone();
        let EncodedQuestion { prompt, answer, initial } =
            self.encoded(index)?.into_question().ok_or_else(|| DataError::NoQuestion { place: place() })?;
        if prompt.is_empty() {
            return Err(DataError::NoPrompt { place: place() });
        }
        let references = match &example.content {
            _ if !example.references.is_empty() => example.references.clone(),
            Content::Text { completion, .. } => vec![completion.clone()],
            _ => vec![self.encoder.text(&answer)?],
        };
        let groups = example.groups.clone();
        Ok(Question { sample: index as u64, prompt, initial, opening: self.opening, references, groups })
    }

    /// The tokens of a sample, cut where it is too long.
    fn encoded(&self, index: usize) -> Result<EncodedSample, DataError> {
        let example = &self.examples[index];
        let place = || example.place.clone();
        let mut sequence = self.encoder.encode(&example.content, &place)?;
        if sequence.length() != self.lengths[index] {
            let (found, recorded) = (sequence.length().total, self.lengths[index].total);
            return Err(DataError::LengthChanged { place: place(), found, recorded });
        }
        self.encoder.mark_initial(&example.content, &mut sequence)?;
        if let Fit::Cut(range) = &self.fits[index] {
            sequence.cut(range.clone());
        }
        Ok(sequence)
    }
}
