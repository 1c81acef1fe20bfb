//! What a row says in each format: from rows to examples.

mod detect;
mod longbench_v2;
mod prompt_completion;
mod tokens;

use std::path::PathBuf;

use super::bad_rows::BadRows;
use super::error::DataError;
use super::example::{Content, Example, Task};
use super::question::SampleGroups;
use super::rows::{self, DataRow, RowSettings};
use super::tokenizer::Tokenizer;
use crate::recipe::DataFormat;
pub(super) use detect::detect;

/// Makes examples of rows.
pub(super) struct ExampleReader<'a> {
    pub(super) format: DataFormat,
    task: &'a Task,
    tokenizer: Option<&'a Tokenizer>,
    vocab_size: usize,
    letters: Option<longbench_v2::LetterClasses>,
}

impl<'a> ExampleReader<'a> {
    /// # Errors
    /// The format needs a tokenizer and there is none, or the labels of the head are not its tokens.
    pub(super) fn new(
        format: DataFormat,
        task: &'a Task,
        tokenizer: Option<&'a Tokenizer>,
        vocab_size: usize,
    ) -> Result<Self, DataError> {
        if format != DataFormat::Tokens && tokenizer.is_none() {
            return Err(DataError::NoTokenizer { what: "text data" });
        }
        let letters = match (format, task, tokenizer) {
            (DataFormat::LongBenchV2, Task::Classify(classes), Some(tokenizer)) => {
                Some(longbench_v2::classes_of_letters(classes, tokenizer)?)
            }
            _ => None,
        };
        Ok(Self { format, task, tokenizer, vocab_size, letters })
    }

    /// The beginning of the reply that ends each prompt.
    pub(super) fn opening(&self) -> &'static str {
        if self.format == DataFormat::LongBenchV2 { longbench_v2::OPENING } else { "" }
    }

    /// The example of a row.
    pub(super) fn example(&self, mut row: DataRow) -> Result<Example, DataError> {
        let place = row.place();
        let text = |content: Content| (content, None::<SampleGroups>);
        let (content, groups) = match (self.format, self.tokenizer) {
            (DataFormat::PromptCompletion, Some(tokenizer)) => text(prompt_completion::content(&mut row, self.task, tokenizer)?),
            (DataFormat::LongBenchV2, _) => longbench_v2::content(&mut row, self.task, self.letters)?,
            _ => text(tokens::content(&mut row, self.task, self.vocab_size)?),
        };
        Ok(Example { place, content, groups, references: Vec::new() })
    }
}

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
