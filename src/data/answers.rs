//! Answers to be scored: `prediction` and `references`, a JSON object per line, one row in memory at a time.

use std::path::Path;

use super::faults;
use super::rows::{self, DataRow};
use crate::recipe::DataRecipe;
use crate::units::Fault;

pub struct Answer<'a> {
    pub prediction: String,
    /// What it might have said; at least one.
    pub references: Vec<String>,
    row: &'a mut DataRow,
}

impl Answer<'_> {
    pub fn text(&mut self, field: &str) -> Result<String, Fault> {
        self.row.text(field).map_err(refused)
    }

    pub fn bad_references(&self, expected: impl Into<String>, found: impl Into<String>) -> Fault {
        refused(self.row.bad("references", expected, found))
    }
}

/// Calls `score` for each row of a JSONL file.
///
/// # Errors
/// The file cannot be read, has no row, or a row lacks a field or has one of another type; or `score` refuses.
pub fn each_answer(path: &Path, mut score: impl FnMut(Answer<'_>) -> Result<(), Fault>) -> Result<(), Fault> {
    let (mut rows, mut is_of_caller) = (0_usize, false);
    let walk = rows::each(path, &DataRecipe::default(), &mut |row| {
        let row = &mut row?;
        let prediction = row.text("prediction")?;
        let references = row.texts("references")?;
        rows += 1;
        score(Answer { prediction, references, row }).inspect_err(|_| is_of_caller = true)
    });
    match walk {
        Err(error) if !is_of_caller => Err(refused(error)),
        Ok(()) if rows == 0 => Err(faults::empty(path)),
        walk => walk,
    }
}

/// What is wrong with a row, with a hint for files of answers.
fn refused(error: Fault) -> Fault {
    if error.io().is_some() {
        return error;
    }
    let hint =
        "each line is a JSON object with `prediction`, a text, `references`, a list of texts, and the fields that `--by` names";
    error.with_hint(hint)
}
