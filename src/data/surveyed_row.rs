//! A row of a survey: what it is, and what becomes of it.

use super::sample_place::SamplePlace;
use crate::units::Fault;

/// A row, and what becomes of it.
#[derive(Debug)]
pub struct SurveyedRow {
    pub place: SamplePlace,
    /// What it is, or why it is no sample.
    pub sample: Result<SurveyedSample, Fault>,
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
    pub fate: SampleFate,
    /// Of its tokens before anything was cut: tells samples apart.
    pub(super) fingerprint: u64,
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

impl SurveyedSample {
    /// How many of its tokens are trained.
    pub fn num_trained(&self) -> usize {
        self.is_trained.iter().filter(|&&trained| trained).count()
    }
}

impl SampleFate {
    /// Whether something of the sample is used.
    pub fn is_used(self) -> bool {
        matches!(self, Self::Whole | Self::Cut(_) | Self::Split(_))
    }
}
