//! What a data format is: the fields that its rows are known by, and how a row becomes an example.

use crate::data::chat::{ChatSample, Conversation, message};
use crate::data::encode::Encoder;
use crate::data::example::{Content, Example};
use crate::data::faults;
use crate::data::label_tokens::Classes;
use crate::data::rows::DataRow;
use crate::data::tokenizer::Tokenizer;
use crate::recipe::{DataFormat, DataRecipe};
use crate::units::Fault;

pub(super) struct RowFormat {
    /// The name in recipes, which say there what contradicts it.
    pub(super) name: DataFormat,
    /// The fields that its rows are known by: all of one of these lists.
    pub(super) known_by: &'static [&'static [&'static str]],
    /// Whether its rows are texts, for which a tokenizer is needed.
    pub(super) has_texts: bool,
    /// Whether a head with classes can be trained on its rows.
    pub(super) has_classes: bool,
    /// Whether a prompt is a message of the user where the model has a chat template.
    pub(super) is_message: fn(&DataRecipe) -> bool,
    /// The beginning of the reply that ends each prompt.
    pub(super) reply_prefix: fn(&DataRecipe) -> &'static str,
    /// Makes an example of a row.
    pub(super) read: fn(&ExampleReader<'_>, &mut DataRow) -> Result<Example, Fault>,
}

impl RowFormat {
    /// A format as most are.
    pub(super) const fn new(name: DataFormat, read: fn(&ExampleReader<'_>, &mut DataRow) -> Result<Example, Fault>) -> Self {
        Self { name, known_by: &[], has_texts: true, has_classes: true, is_message: |_| false, reply_prefix: |_| "", read }
    }
}

/// A format, and what it may ask when it reads rows.
pub(in crate::data) struct ExampleReader<'a> {
    pub(super) format: &'static RowFormat,
    pub(super) recipe: &'a DataRecipe,
    /// The classes of the head, where it has any.
    pub(super) classes: Option<&'a Classes>,
    pub(super) encoder: &'a Encoder,
    /// Whether a prompt is a message of the user, as the model has a chat template.
    pub(super) has_template: bool,
}

impl<'a> ExampleReader<'a> {
    pub(super) fn tokenizer(&self) -> Result<&'a Tokenizer, Fault> {
        self.encoder.tokenizer.as_ref().ok_or_else(|| faults::no_tokenizer("text data"))
    }

    /// Refuses a text where the recipe trains messages of an assistant.
    pub(super) fn refuse_text_for_messages(&self, row: &DataRow, field: &str) -> Result<(), Fault> {
        match self.recipe.chat.train_on.filter(|train_on| train_on.is_of_messages()) {
            Some(train_on) => {
                Err(row.bad(field, format!("messages, of which `data.train_on = \"{train_on}\"` speaks"), "a text"))
            }
            None => Ok(()),
        }
    }
}

/// A row as a prompt and its answers.
pub(super) struct TextRow {
    pub(super) prompt: String,
    pub(super) completion: String,
    /// The right answers; at least one.
    pub(super) references: Vec<String>,
}

impl TextRow {
    /// A sample; as messages, the prompt is one of the user, and the completion the reply.
    pub(super) fn example(self, is_message: bool) -> Example {
        let Self { prompt, completion, references } = self;
        let content = if is_message {
            let messages = vec![message("user", &prompt), message("assistant", &completion)];
            let conversation = Conversation { messages, ..Conversation::default() };
            ChatSample { conversation, trains: vec![None, None], prompt: Some(1) }.into()
        } else {
            Content::Text { prompt, completion }
        };
        Example { references, ..Example::new(content) }
    }
}
