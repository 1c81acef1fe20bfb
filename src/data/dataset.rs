//! The samples of a split: their lengths at once, their tokens when a batch asks for them.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::batch::{Batch, Sequence};
use super::chat::ChatNotes;
use super::encode::{EncodedQuestion, EncodedSample, Encoder};
use super::error::DataError;
use super::on_too_long::Fit;
use super::question::{Question, SampleGroups};
use super::sample_place::SamplePlace;
use super::token_cache::Tokens;
use super::token_file::{About, fingerprint};
use super::windows::{Window, windows};
use crate::recipe::DataFormat;

/// Samples to train on or to validate with, in file order.
#[derive(Clone)]
pub struct Dataset {
    samples: Arc<Samples>,
    /// What is run, one by one: samples of this split, or parts of them.
    pieces: Vec<Piece>,
    lengths: Vec<usize>,
}

/// All samples of some files: two splits can share them.
pub(super) struct Samples {
    pub(super) paths: Vec<PathBuf>,
    /// Of the content of the files.
    pub(super) hash: String,
    pub(super) tokens: Tokens,
    pub(super) encoder: Encoder,
    pub(super) format: DataFormat,
    /// The end of each prompt that is the beginning of the reply.
    pub(super) opening: &'static str,
    /// Whether the tokens of each sample have been found to be those that were written.
    pub(super) are_checked: Vec<AtomicBool>,
}

/// A sample, or what of it is run at once.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    sample: usize,
    part: Part,
}

#[derive(Clone, Debug)]
enum Part {
    Whole,
    /// Without these tokens.
    Without(Range<usize>),
    Window(Window),
}

/// How long samples may be.
pub(super) struct Limit {
    /// Tokens.
    pub(super) tokens: usize,
    /// Tokens that windows share.
    pub(super) overlap: usize,
}

impl Piece {
    /// The pieces that a sample becomes; none where it is left out.
    pub(super) fn of(sample: usize, fit: &Fit, total: usize, limit: &Limit) -> Vec<Self> {
        match fit {
            Fit::Whole => vec![Self { sample, part: Part::Whole }],
            Fit::Cut(range) => vec![Self { sample, part: Part::Without(range.clone()) }],
            Fit::Split => {
                windows(total, limit.tokens, limit.overlap).map(|window| Self { sample, part: Part::Window(window) }).collect()
            }
            Fit::Dropped | Fit::NothingToCut => Vec::new(),
        }
    }

    /// The sample that it is of.
    pub(super) fn sample(&self) -> usize {
        self.sample
    }
}

impl Dataset {
    pub(super) fn new(samples: Arc<Samples>, pieces: Vec<Piece>) -> Self {
        let lengths = pieces.iter().map(|piece| samples.num_inputs(piece)).collect();
        Self { samples, pieces, lengths }
    }

    /// Number of samples, at least one; windows of a sample count one by one.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Never true for an opened data set; here because `len` is.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Tokens that are run, per sample.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// The tokens of these samples (indices from 0 to `len` - 1), cut where they are too long; sequence `i` is `samples[i]`.
    pub fn batch(&self, samples: &[usize]) -> Result<Batch, DataError> {
        if samples.is_empty() {
            return Err(self.bad_batch(&"no samples"));
        }
        let sequence = |&sample: &usize| {
            let piece = self.piece(sample)?;
            Ok(self.samples.encoded(piece)?.into_sequence(piece.sample))
        };
        Ok(Batch { sequences: samples.iter().map(sequence).collect::<Result<Vec<Sequence>, DataError>>()? })
    }

    /// The prompt of a sample, and its answer as text.
    pub fn question(&self, sample: usize) -> Result<Question, DataError> {
        self.samples.question(self.piece(sample)?)
    }

    /// The question that follows the thoughts which were the reply to one; `None` where the reply was the answer.
    pub fn following(&self, question: &Question, thoughts: &str) -> Result<Option<Question>, DataError> {
        let Some(follow_up) = &question.follow_up else { return Ok(None) };
        let (prompt, initial) = self.samples.encoder.follow_up(follow_up, thoughts)?;
        Ok(Some(Question { prompt, initial, follow_up: None, ..question.clone() }))
    }

    /// What a sample is reported under, where its file says.
    pub fn groups(&self, sample: usize) -> Result<Option<SampleGroups>, DataError> {
        let sample = self.piece(sample)?.sample;
        Ok(self.samples.tokens.about(&self.samples.paths, sample)?.groups)
    }

    /// The first samples alone, in file order; all, where there are not as many.
    pub fn first(mut self, count: usize) -> Self {
        self.pieces.truncate(count);
        self.lengths.truncate(count);
        self
    }

    /// The samples by their indices in the files, in order; a sample in windows stands there once.
    pub fn samples(&self) -> Vec<usize> {
        let mut samples: Vec<usize> = self.pieces.iter().map(|piece| piece.sample).collect();
        samples.dedup();
        samples
    }

    /// The file which the samples come from, the first of several.
    pub fn path(&self) -> &Path {
        self.samples.paths.first().map_or(Path::new(""), PathBuf::as_path)
    }

    /// What the files hold.
    pub fn format(&self) -> DataFormat {
        self.samples.format
    }

    /// Hash of the content of its files: a resumed run must find the same.
    pub fn hash(&self) -> &str {
        &self.samples.hash
    }

    /// What is worth telling of all samples of its files.
    pub(super) fn notes(&self) -> &ChatNotes {
        &self.samples.tokens.notes
    }

    fn piece(&self, sample: usize) -> Result<&Piece, DataError> {
        self.pieces.get(sample).ok_or_else(|| self.bad_batch(&format_args!("sample {sample}")))
    }

    fn bad_batch(&self, found: &dyn fmt::Display) -> DataError {
        DataError::BadBatch { found: found.to_string(), len: self.len() }
    }
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dataset").field("paths", &self.samples.paths).field("len", &self.len()).finish_non_exhaustive()
    }
}

impl Samples {
    /// The samples of which nothing is run, but for those of more than `most` tokens; `pieces` is what is run.
    pub(super) fn dropped(&self, pieces: &[Piece], most: usize) -> Vec<Piece> {
        let file = &self.tokens.file;
        let is_run = |sample| pieces.binary_search_by_key(&sample, |piece| piece.sample).is_ok();
        let is_dropped = |sample: &usize| file.length(*sample).total <= most && !is_run(*sample);
        (0..file.len()).filter(is_dropped).map(|sample| Piece { sample, part: Part::Whole }).collect()
    }

    fn num_inputs(&self, piece: &Piece) -> usize {
        let file = &self.tokens.file;
        let tokens = match &piece.part {
            Part::Whole => file.ids(piece.sample).len(),
            Part::Without(range) => file.ids(piece.sample).len() - range.len(),
            Part::Window(window) => window.tokens.len(),
        };
        // The last token is only ever a target, but where a class is read at it.
        tokens - usize::from(file.class(piece.sample).is_none())
    }

    fn place(&self, sample: usize) -> Result<SamplePlace, DataError> {
        self.tokens.place(&self.paths, sample)
    }

    fn question(&self, piece: &Piece) -> Result<Question, DataError> {
        let mut about = self.tokens.about(&self.paths, piece.sample)?;
        let Some(EncodedQuestion { prompt, answer, initial }) = self.encoded(piece)?.into_question() else {
            return Err(DataError::NoQuestion { place: self.place(piece.sample)? });
        };
        if prompt.is_empty() {
            return Err(DataError::NoPrompt { place: self.place(piece.sample)? });
        }
        let references = match about.references.take() {
            Some(references) => references,
            None => vec![self.encoder.text(&answer)?],
        };
        let About { groups, border, follow_up, .. } = about;
        let (sample, opening, border) = (piece.sample as u64, self.opening, border.unwrap_or_default());
        Ok(Question { sample, prompt, initial, opening, border, references, follow_up, groups })
    }

    /// The tokens of a piece.
    fn encoded(&self, piece: &Piece) -> Result<EncodedSample, DataError> {
        let Tokens { file, map, .. } = &self.tokens;
        let ids = file.ids(piece.sample);
        if !self.are_checked[piece.sample].load(Ordering::Relaxed) {
            if fingerprint(ids) != file.fingerprint(piece.sample) {
                return Err(DataError::DamagedTokens { place: self.place(piece.sample)? });
            }
            self.are_checked[piece.sample].store(true, Ordering::Relaxed);
        }
        let encoded = match &piece.part {
            Part::Whole => file.part(piece.sample, 0..ids.len()),
            Part::Without(range) => {
                let mut encoded = file.part(piece.sample, 0..ids.len());
                encoded.cut(range.clone());
                encoded
            }
            Part::Window(Window { tokens, context }) => {
                let mut encoded = file.part(piece.sample, tokens.clone());
                encoded.without_targets_before(*context);
                encoded
            }
        };
        if let Some(map) = map {
            // They are looked at once an epoch.
            map.release(ids);
        }
        Ok(encoded)
    }
}
