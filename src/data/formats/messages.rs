//! The format `messages`: conversations with `role` and `content`, also `tools`, `documents` and `chat_template_kwargs`.

use super::format::RowFormat;
use super::text;
use crate::data::chat::sample;
use crate::data::example::Example;
use crate::recipe::DataFormat;

const FIELD: &str = "messages";

const FACTS: DataFormat = DataFormat {
    also: &["chat", "chat_template", "openai"],
    has_messages: true,
    ..DataFormat::of("messages", "messages text tools documents chat_template_kwargs")
};

pub(super) const FORMAT: RowFormat = RowFormat {
    known_by: &[&[FIELD]],
    ..RowFormat::new(FACTS, |reader, row| {
        // As TRL has it: a row of plain text among conversations, all of which is trained.
        if !row.has(FIELD) && row.has("text") {
            reader.refuse_text_for_messages(row, "text")?;
            return (text::FORMAT.read)(reader, row);
        }
        let messages = row.require(FIELD)?;
        sample(row, FIELD, messages).map(Example::new)
    })
};
