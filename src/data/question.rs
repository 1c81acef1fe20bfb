//! A sample as a question: its prompt alone, and what may be answered.

use serde::{Deserialize, Serialize};

/// A prompt to be answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Index of the sample in its file, counted from 0.
    pub sample: u64,
    /// The tokens of the prompt, cut where the sample is.
    pub prompt: Vec<u32>,
    /// The first position of the prompt's initial part, and the one behind it; `None` where nobody asked.
    pub initial: Option<(usize, usize)>,
    /// The end of the prompt that is the beginning of the reply; empty where the reply is all that comes.
    pub opening: &'static str,
    /// The right answers; at least one.
    pub references: Vec<String>,
    /// What the sample is reported under, where its file says.
    pub groups: Option<SampleGroups>,
}

/// What `LongBench` v2 reports samples under.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleGroups {
    /// `easy` or `hard`.
    pub difficulty: String,
    /// `short`, `medium` or `long`.
    pub length: String,
    /// What it is about.
    pub domain: String,
}

impl SampleGroups {
    /// Difficulty, length and domain.
    pub fn by(&self) -> [&str; 3] {
        [&self.difficulty, &self.length, &self.domain]
    }
}
