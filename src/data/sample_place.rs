//! Where a sample stands in its file.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::units::abridged;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LineOrRecord {
    /// Number of a line, counted from 1.
    Line(usize),
    /// Number of a record, counted from 0.
    Record(usize),
    /// All of it: the file is one sample.
    Whole,
}

/// A sample's place, as people look it up: `train.jsonl:12`, or record 3 of `data.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SamplePlace {
    pub path: Arc<Path>,
    pub at: LineOrRecord,
}

impl fmt::Display for SamplePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.at {
            LineOrRecord::Line(line) => write!(f, "`{}:{line}`", abridged(self.path.display())),
            LineOrRecord::Whole => write!(f, "`{}`", abridged(self.path.display())),
            LineOrRecord::Record(record) => write!(f, "record {record} (from 0) of `{}`", abridged(self.path.display())),
        }
    }
}
