//! A look at files without a recipe or a tokenizer: which columns their rows have, what these hold, and how long the rows are.

use std::collections::BTreeSet;

use serde_json::Value;

use super::bad_rows::BadRows;
use super::formats::detect;
use super::rows::{self, DataRow, SplitName, kind};
use super::survey::count_length;
use crate::recipe::{DataPaths, DataRecipe, OnBadRow};
use crate::units::Fault;

#[derive(Clone, Debug, Default)]
pub struct ColumnLook {
    pub name: String,
    /// Rows in which it is there and not null.
    pub filled: usize,
    /// What it holds, in words.
    pub kinds: BTreeSet<&'static str>,
    /// Characters of its longest text, or of all texts in its longest list or object.
    pub longest: usize,
}

#[derive(Debug)]
pub struct FileLook {
    /// What of folders was left out.
    pub notes: Vec<String>,
    /// The format that the rows tell, and from what.
    pub format: Result<String, Fault>,
    pub rows: usize,
    /// Rows that are no JSON object or cannot be read.
    pub bad: usize,
    pub first_bad: Option<Fault>,
    pub columns: Vec<ColumnLook>,
    /// Rows by the power of two that is not below the characters of their texts.
    pub lengths: Vec<usize>,
}

/// Looks at all rows, and hands over each sound one with its place, as JSON.
///
/// # Errors
/// Files are missing, empty or damaged, or `sink` refuses.
pub fn look(
    data: &DataPaths,
    sink: &mut dyn FnMut(&dyn std::fmt::Display, Value) -> Result<(), Fault>,
) -> Result<FileLook, Fault> {
    let mut notes = Vec::new();
    let files = rows::find(data.paths(), SplitName::Train, &mut notes)?;
    let recipe = DataRecipe::default();
    let (mut bad, mut columns, mut lengths) = (BadRows::new(OnBadRow::Drop), Vec::new(), Vec::new());
    for file in &files {
        rows::each(file, &recipe, &mut |row| {
            match row {
                Err(error) => bad.note(error),
                Ok(row) => {
                    bad.read += 1;
                    count_length(&mut lengths, count(&row, &mut columns));
                    sink(&row.place(), row.fields().clone().into())?;
                }
            }
            Ok::<(), Fault>(())
        })?;
    }
    let (rows, count) = (bad.read, bad.count);
    let first_bad = bad.finish(&files.first().cloned().unwrap_or_default())?;
    let format = detect(&files, &recipe).map(|detected| detected.words);
    Ok(FileLook { notes, format, rows, bad: count, first_bad, columns, lengths })
}

/// Adds a row to its columns; the characters of its texts.
fn count(row: &DataRow, columns: &mut Vec<ColumnLook>) -> usize {
    let mut sum = 0;
    for (name, value) in row.fields() {
        let at = columns.iter().position(|column| column.name == *name).unwrap_or_else(|| {
            columns.push(ColumnLook { name: name.clone(), ..ColumnLook::default() });
            columns.len() - 1
        });
        if value.is_null() {
            continue;
        }
        let (column, length) = (&mut columns[at], characters(value));
        column.filled += 1;
        column.kinds.insert(kind(value));
        column.longest = column.longest.max(length);
        sum += length;
    }
    sum
}

fn characters(value: &Value) -> usize {
    match value {
        Value::String(text) => text.chars().count(),
        Value::Array(values) => values.iter().map(characters).sum(),
        Value::Object(fields) => fields.values().map(characters).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}
