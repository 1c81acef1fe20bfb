//! The format `text`: rows with `text`, all of which is trained; a file of plain text is one row.

use super::format::RowFormat;
use super::prompt_completion::classified;
use crate::data::example::{Content, Example};
use crate::data::label_tokens::Classes;
use crate::data::rows::DataRow;
use crate::data::tokenizer::Tokenizer;
use crate::recipe::DataFormat;
use crate::units::Fault;

const FACTS: DataFormat = DataFormat::of("text", "text label");

pub(super) const FORMAT: RowFormat = RowFormat {
    known_by: &[&["text"]],
    rank: 2,
    has_classes: true,
    ..RowFormat::new(FACTS, |reader, row| content(row, reader.classes, reader.tokenizer()?).map(Example::new))
};

fn content(row: &mut DataRow, classes: Option<&Classes>, tokenizer: &Tokenizer) -> Result<Content, Fault> {
    let text = row.text("text")?;
    match classes {
        None if text.is_empty() => Err(row.bad("text", "a text to train on", "an empty one")),
        None => Ok(Content::Text { prompt: String::new(), completion: text }),
        Some(classes) => classified(row, text, "label", classes, tokenizer),
    }
}
