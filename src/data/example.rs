//! One sample as its file gives it, before tokenisation, and where it stands.

use std::fmt;
use std::path::PathBuf;

use super::label_tokens::Classes;

/// Which line or record of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineOrRecord {
    /// Line, counted from 1.
    Line(usize),
    /// Record, counted from 0.
    Record(usize),
}

/// A sample's place, as people look it up: `train.jsonl:12`, or record 3 of `data.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SamplePlace {
    /// The data file.
    pub path: PathBuf,
    /// Where in it.
    pub at: LineOrRecord,
}

impl fmt::Display for SamplePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.at {
            LineOrRecord::Line(line) => write!(f, "`{}:{line}`", self.path.display()),
            LineOrRecord::Record(record) => write!(f, "record {record} (from 0) of `{}`", self.path.display()),
        }
    }
}

/// A sample and its place in the file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Example {
    pub(super) at: LineOrRecord,
    pub(super) content: Content,
}

/// What a sample holds.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Content {
    /// A prompt and what must follow it.
    Text { prompt: String, completion: String },
    /// A prompt and its class.
    TextClass { prompt: String, class: usize },
    /// Token ids, and which of them are targets.
    Tokens { ids: Vec<u32>, is_trained: Vec<bool> },
    /// Token ids and their class.
    TokensClass { ids: Vec<u32>, class: usize },
}

/// What the head makes of a sample: decides what a format's reader must look for.
#[derive(Clone, Debug)]
pub(super) enum Task {
    NextToken,
    Classify(Classes),
}
