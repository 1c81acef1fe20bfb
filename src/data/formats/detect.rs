//! Which format files have, by the fields of their first rows.

use std::path::PathBuf;

use crate::data::error::DataError;
use crate::data::rows::{self, DataRow, RowSettings};
use crate::recipe::DataFormat;

/// Rows that are looked at.
const LOOKED_AT: usize = 10;

/// The fields that a format is known by; the first format whose fields are all there counts.
const KNOWN_BY: [(DataFormat, &[&str]); 4] = [
    (DataFormat::LongBenchV2, &["context", "question", "choice_A", "choice_B", "choice_C", "choice_D", "answer"]),
    (DataFormat::Tokens, &["input_ids"]),
    (DataFormat::PromptCompletion, &["prompt", "completion"]),
    (DataFormat::PromptCompletion, &["prompt", "label"]),
];

/// The format of files, and what it was told from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::data) struct Detected {
    pub(in crate::data) format: DataFormat,
    /// In words.
    pub(in crate::data) told_from: String,
}

/// Why the look ends.
enum LookEnd {
    Enough,
    Failed(DataError),
}

impl From<DataError> for LookEnd {
    fn from(error: DataError) -> Self {
        Self::Failed(error)
    }
}

/// Looks at the first sound rows of the first files.
///
/// # Errors
/// There is no sound row; its fields are those of no format; or the rows do not agree.
pub(in crate::data) fn detect(files: &[PathBuf], settings: &RowSettings) -> Result<Detected, DataError> {
    let mut detected: Option<Detected> = None;
    let mut bad = None;
    let mut looked_at = 0;
    for file in files {
        let walk = rows::each(file, settings, &mut |row| {
            match row {
                Ok(row) => {
                    let of_row = of_row(&row)?;
                    match &detected {
                        Some(before) if before.format != of_row.format => {
                            let found = format!("{}, but {}", of_row.words(), before.words());
                            return Err(DataError::UnknownFormat { place: row.place(), found }.into());
                        }
                        Some(_) => {}
                        None => detected = Some(of_row),
                    }
                }
                Err(error) => bad = bad.take().or(Some(error)),
            }
            looked_at += 1;
            if looked_at < LOOKED_AT { Ok(()) } else { Err(LookEnd::Enough) }
        });
        match walk {
            Ok(()) => {}
            Err(LookEnd::Enough) => break,
            Err(LookEnd::Failed(error)) => return Err(error),
        }
    }
    match (detected, bad, files.first()) {
        (Some(detected), ..) => Ok(detected),
        (None, Some(error), _) => Err(error),
        (None, None, path) => Err(DataError::Empty { path: path.cloned().unwrap_or_default() }),
    }
}

impl Detected {
    /// For messages.
    pub(in crate::data) fn words(&self) -> String {
        format!("`{}` by {}", self.format, self.told_from)
    }
}

fn of_row(row: &DataRow) -> Result<Detected, DataError> {
    let known = KNOWN_BY.iter().find(|(_, fields)| fields.iter().all(|&field| row.fields().contains_key(field)));
    let listed = |fields: &mut dyn Iterator<Item = &str>| fields.map(|field| format!("`{field}`")).collect::<Vec<_>>().join(", ");
    let Some(&(format, fields)) = known else {
        let found = format!("the fields {}", listed(&mut row.fields().keys().map(String::as_str)));
        return Err(DataError::UnknownFormat { place: row.place(), found });
    };
    Ok(Detected { format, told_from: format!("the fields {} of {}", listed(&mut fields.iter().copied()), row.place()) })
}
