//! A sample as a question: its prompt alone, and what may be answered.

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Index of the sample in its file, counted from 0.
    pub sample: u64,
    /// The tokens of the prompt, cut where the sample is.
    pub prompt: Vec<u32>,
    /// The first position of the prompt's initial part, and the one behind it; `None` where nobody asked.
    pub initial: Option<(usize, usize)>,
    /// The end of the prompt that is the beginning of the reply; empty where the reply is all that comes.
    pub reply_prefix: &'static str,
    /// The end of the prompt's text that is not in its tokens: the first token of the reply reaches over the border, and has it.
    pub border: String,
    /// The right answers; at least one.
    pub references: Vec<String>,
    /// What is asked when the reply has come, where that is but thoughts.
    pub follow_up: Option<FollowUp>,
    /// What the sample is reported under, where its file says.
    pub groups: Option<SampleGroups>,
}

/// What is asked when the reply to a question is thoughts: a text with the thoughts in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FollowUp {
    pub(super) before: String,
    pub(super) after: String,
    /// Whether it is a message of the user, by the chat template.
    pub(super) is_message: bool,
    /// Tokens that it may have, before the chat template.
    pub(super) max_tokens: Option<usize>,
}

/// What `LongBench` v2 reports samples under.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleGroups {
    /// `easy` or `hard`.
    pub difficulty: String,
    /// `short`, `medium` or `long`.
    pub length: String,
    pub domain: String,
}

impl SampleGroups {
    pub fn by(&self) -> [&str; 3] {
        [&self.difficulty, &self.length, &self.domain]
    }
}
