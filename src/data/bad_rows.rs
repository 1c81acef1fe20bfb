//! Rows that cannot be read, or are no samples: counted, and the first of them kept to be told.

use super::error::DataError;
use crate::recipe::OnBadRow;

/// So many are told.
const TOLD: usize = 10;

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

    /// What was wrong, and with how many: nothing, or rows that the recipe leaves out.
    ///
    /// # Errors
    /// There are bad rows, and the recipe does not leave them out.
    pub(super) fn finish(mut self) -> Result<(usize, Vec<DataError>), DataError> {
        match (self.on_bad_row, self.count) {
            (OnBadRow::Drop, _) | (_, 0) => Ok((self.count, self.first)),
            (OnBadRow::Error, 1) => Err(self.first.remove(0)),
            (OnBadRow::Error, count) => Err(DataError::BadRows { first: self.first, count, read: self.read }),
        }
    }
}
