//! What a row says in each format: from rows to examples.

mod detect;
mod helmet;
mod longbench_v2;
mod prompt_completion;
mod reader;
mod ruler;
#[cfg(test)]
mod tests;
mod text;
mod text_row;
mod tokens;

use std::path::PathBuf;

use super::bad_rows::BadRows;
use super::error::DataError;
use super::example::Example;
use super::rows::{self, RowSettings};
pub(super) use detect::detect;
pub(super) use reader::ExampleReader;

/// Hands over the examples of files in their order, one at a time. A bad row is noted in `bad`, which decides whether all ends there.
///
/// # Errors
/// A file cannot be read, or is damaged; or `sink` refuses.
pub(super) fn each_example(
    files: &[PathBuf],
    settings: &RowSettings,
    reader: &ExampleReader<'_>,
    bad: &mut BadRows,
    sink: &mut dyn FnMut(Example) -> Result<(), DataError>,
) -> Result<(), DataError> {
    for file in files {
        rows::each(file, settings, &mut |row| match row.and_then(|row| reader.example(row)) {
            Ok(example) => {
                bad.good();
                sink(example)
            }
            Err(error) => {
                bad.note(error);
                Ok(())
            }
        })?;
    }
    Ok(())
}
