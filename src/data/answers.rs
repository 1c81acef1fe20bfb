//! Answers to be scored: `prediction` and `references`, a JSON object per line, one row in memory at a time.

use std::path::Path;

use super::error::DataError;
use super::rows::{self, DataRow, RowSettings};

/// An answer and what it is compared with.
pub struct Answer<'a> {
    pub prediction: String,
    /// What it might have said; at least one.
    pub references: Vec<String>,
    row: &'a mut DataRow,
}

impl Answer<'_> {
    /// Another text of the row.
    pub fn text(&mut self, field: &'static str) -> Result<String, DataError> {
        self.row.text(field).map_err(refused)
    }

    /// The references are none that can be scored.
    pub fn bad_references(&self, expected: impl Into<String>, found: impl Into<String>) -> DataError {
        refused(self.row.bad("references", expected, found))
    }
}

/// Why the walk ended early.
enum Stop<E> {
    Row(DataError),
    Caller(E),
}

impl<E> From<DataError> for Stop<E> {
    fn from(error: DataError) -> Self {
        Self::Row(refused(error))
    }
}

/// Calls `score` for each row of a JSONL file.
///
/// # Errors
/// The file cannot be read, has no row, or a row lacks a field or has one of another type; or `score` refuses.
pub fn each_answer<E: From<DataError>>(path: &Path, mut score: impl FnMut(Answer<'_>) -> Result<(), E>) -> Result<(), E> {
    let mut rows = 0_usize;
    let walk = rows::each(path, &RowSettings::default(), &mut |row| {
        let row = &mut row?;
        let prediction = row.text("prediction")?;
        let references = row.texts("references")?;
        rows += 1;
        score(Answer { prediction, references, row }).map_err(Stop::Caller)
    });
    match walk {
        Err(Stop::Row(error)) => Err(error.into()),
        Err(Stop::Caller(error)) => Err(error),
        Ok(()) if rows == 0 => Err(DataError::Empty { path: path.to_path_buf() }.into()),
        Ok(()) => Ok(()),
    }
}

/// What is wrong with a row, with a hint for files of answers.
fn refused(error: DataError) -> DataError {
    match error {
        DataError::Read { .. } => error,
        _ => DataError::Answer(Box::new(error)),
    }
}
