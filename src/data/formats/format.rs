//! What a data format is: the fields that its rows are known by, and how a row becomes an example.

use serde_json::{Value, json};

use crate::data::chat::{ChatSample, Conversation, message};
use crate::data::encode::Encoder;
use crate::data::example::{Content, Example};
use crate::data::faults;
use crate::data::label_tokens::Classes;
use crate::data::media;
use crate::data::rows::DataRow;
use crate::data::tokenizer::Tokenizer;
use crate::recipe::{DataFormat, DataRecipe};
use crate::units::Fault;

#[derive(Debug)]
pub(in crate::data) struct RowFormat {
    pub(in crate::data) facts: DataFormat,
    /// The fields that its rows are known by: all of one of these lists.
    pub(super) known_by: &'static [&'static [&'static str]],
    /// Of formats whose fields a row has, the first of the lowest rank counts: beside tokens may be their texts, and a `text` beside anything.
    pub(super) rank: u8,
    pub(super) has_classes: bool,
    /// Whether a prompt is a message of the user where the model has a chat template.
    pub(super) is_message: fn(&DataRecipe) -> bool,
    /// The beginning of the reply that ends each prompt.
    pub(in crate::data) reply_prefix: fn(&DataRecipe) -> &'static str,
    pub(super) read: fn(&ExampleReader<'_>, &mut DataRow) -> Result<Example, Fault>,
}

impl RowFormat {
    pub(super) const fn new(facts: DataFormat, read: fn(&ExampleReader<'_>, &mut DataRow) -> Result<Example, Fault>) -> Self {
        Self { facts, known_by: &[], rank: 1, has_classes: false, is_message: |_| false, reply_prefix: |_| "", read }
    }
}

/// A format, and what it may ask when it reads rows.
pub(in crate::data) struct ExampleReader<'a> {
    format: &'static RowFormat,
    pub(super) recipe: &'a DataRecipe,
    pub(super) classes: Option<&'a Classes>,
    pub(in crate::data) encoder: &'a Encoder,
    pub(super) has_template: bool,
}

impl<'a> ExampleReader<'a> {
    /// Fails where the recipe contradicts the format, or this needs a tokenizer that is not there, or has no classes, which the head asks for.
    pub(in crate::data) fn new(
        recipe: &'a DataRecipe,
        format: &'static RowFormat,
        classes: Option<&'a Classes>,
        encoder: &'a Encoder,
    ) -> Result<Self, Fault> {
        if let Some((_, error)) = recipe.contradiction(&format.facts) {
            return Err(error);
        }
        let mut reader = Self { format, recipe, classes, encoder, has_template: false };
        if format.facts.has_texts {
            reader.tokenizer()?;
        }
        if !format.has_classes && classes.is_some() {
            let message = format!("`data.format = \"{}\"` has no classes, which the head asks for", format.facts.name);
            return Err(Fault::data(message, "use `head.kind = \"next_token\"`, or rows with `prompt` and `label`"));
        }
        reader.has_template = classes.is_none() && (format.is_message)(recipe) && encoder.chat.has_template()?;
        Ok(reader)
    }

    /// All that decides what it makes of a row, key by key.
    pub(in crate::data) fn identity(&self) -> Value {
        let DataRecipe { prompt, max_prompt_tokens, family, .. } = self.recipe;
        json!({
            "format": self.format.facts.name, "classes": self.classes, "prompt": prompt, "max_prompt_tokens": max_prompt_tokens,
            "family": family, "has_template": self.has_template,
        })
    }

    pub(in crate::data) fn example(&self, mut row: DataRow) -> Result<Example, Fault> {
        media::refuse(&row)?;
        let mut example = (self.format.read)(self, &mut row)?;
        if let Content::Chat(sample) = &mut example.content {
            // The recipe's variables are under those of the row.
            let own = std::mem::replace(&mut sample.conversation.variables, self.recipe.chat.variables()?);
            sample.conversation.variables.extend(own);
        }
        Ok(example)
    }

    pub(super) fn tokenizer(&self) -> Result<&'a Tokenizer, Fault> {
        self.encoder.tokenizer.as_ref().ok_or_else(|| faults::no_tokenizer("text data"))
    }

    /// Refuses a text where the recipe trains messages of an assistant.
    pub(super) fn refuse_text_for_messages(&self, row: &DataRow, field: &str) -> Result<(), Fault> {
        let Some(train_on) = self.recipe.chat.train_on.filter(|train_on| train_on.is_of_messages()) else { return Ok(()) };
        Err(row.bad(field, format!("messages, of which `data.train_on = \"{train_on}\"` speaks"), "a text"))
    }
}

/// A row as a prompt and its answers.
pub(super) struct TextRow {
    pub(super) prompt: String,
    pub(super) completion: String,
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
