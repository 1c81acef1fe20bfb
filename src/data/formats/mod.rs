//! What a row says in each format: from rows to examples.

mod columns;
mod detect;
mod helmet;
mod longbench_v2;
#[cfg(test)]
mod malformed_tests;
mod media;
mod prompt_completion;
mod reader;
mod ruler;
#[cfg(test)]
mod tests;
mod text;
mod text_row;
mod tokens;

use super::example::Example;
use super::rows;
use super::source::DataSource;
use crate::units::Fault;
pub(super) use detect::detect;
pub(super) use reader::ExampleReader;

/// Hands over the examples of files in their order, one at a time, and what is wrong with a row in its place.
///
/// # Errors
/// A file cannot be read, or is damaged; or `sink` refuses.
pub(super) fn each_example(
    source: &DataSource,
    reader: &ExampleReader<'_>,
    sink: &mut dyn FnMut(Result<Example, Fault>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    source.files.iter().try_for_each(|file| {
        rows::each(file, &source.rows, &mut |row| {
            let example = row.and_then(|row| reader.example(row));
            sink(example)
        })
    })
}
