//! A row as a prompt and its answers.

use crate::data::chat::{ChatSample, Conversation, message};
use crate::data::example::{Content, Example};
use crate::data::rows::DataRow;

pub(super) struct TextRow {
    pub(super) prompt: String,
    pub(super) completion: String,
    /// The right answers; at least one.
    pub(super) references: Vec<String>,
}

impl TextRow {
    /// A sample; as messages, the prompt is one of the user, and the completion the reply.
    pub(super) fn example(self, row: &DataRow, is_message: bool) -> Example {
        let Self { prompt, completion, references } = self;
        let content = if is_message {
            let messages = vec![message("user", &prompt), message("assistant", &completion)];
            let conversation = Conversation { messages, ..Conversation::default() };
            ChatSample { conversation, trains: vec![None, None], prompt: Some(1) }.into()
        } else {
            Content::Text { prompt, completion }
        };
        Example { references, ..Example::new(row, content) }
    }
}
