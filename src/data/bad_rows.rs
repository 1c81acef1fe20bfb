//! Rows that cannot be read, or are no samples: counted, and the first of them kept to be told.

use std::path::Path;

use super::error::DataError;
use crate::recipe::OnBadRow;

const TOLD: usize = 10;

/// What an error of a row is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorScope {
    /// The row is no sample: `data.on_bad_row` decides.
    Row,
    /// The sample is too long: `data.on_too_long` has decided.
    Length,
    /// No row can be read or encoded.
    All,
}

impl DataError {
    /// What it is about, where it was found at a row.
    pub fn scope(&self) -> ErrorScope {
        match self {
            Self::TooLong { .. } | Self::NoPlainText { .. } => ErrorScope::Length,
            Self::NotJson { .. }
            | Self::BadRow { .. }
            | Self::Shape { .. }
            | Self::MissingField { .. }
            | Self::BadField { .. }
            | Self::UnknownFormat { .. }
            | Self::Messages { .. }
            | Self::Conversation { .. }
            | Self::OutOfVocabulary { .. }
            | Self::NoTarget { .. } => ErrorScope::Row,
            _ => ErrorScope::All,
        }
    }
}

/// What was wrong with rows.
#[derive(Debug)]
pub(super) struct BadRows {
    on_bad_row: OnBadRow,
    first: Vec<DataError>,
    count: usize,
    read: usize,
}

impl BadRows {
    pub(super) fn new(on_bad_row: OnBadRow) -> Self {
        Self { on_bad_row, first: Vec::new(), count: 0, read: 0 }
    }

    /// A row that was read.
    pub(super) fn good(&mut self) {
        self.read += 1;
    }

    /// A row that is no sample.
    pub(super) fn note(&mut self, error: DataError) {
        self.read += 1;
        self.count += 1;
        if self.first.len() < TOLD {
            self.first.push(error);
        }
    }

    /// Rows, and those of them that are no samples.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.read, self.count)
    }

    /// What the recipe leaves out, where there is any.
    ///
    /// # Errors
    /// There are bad rows, and the recipe does not leave them out; or there are no others.
    pub(super) fn finish(mut self, path: &Path) -> Result<Option<DataError>, DataError> {
        let has_samples = self.count < self.read;
        let is_dropped = self.on_bad_row == OnBadRow::Drop;
        let error = match self.count {
            0 if has_samples => return Ok(None),
            0 => return Err(DataError::Empty { path: path.to_path_buf() }),
            1 => self.first.remove(0),
            count => DataError::BadRows { first: self.first, count, read: self.read },
        };
        if is_dropped && has_samples { Ok(Some(error)) } else { Err(error) }
    }
}
