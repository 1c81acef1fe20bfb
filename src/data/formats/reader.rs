//! From a row to its example, by the format.

use serde_json::{Value, json};

use super::longbench_v2::{self, LetterClasses, LongBenchRow};
use super::text_row::TextRow;
use super::{helmet, media, prompt_completion, ruler, text, tokens};
use crate::data::chat::{self, ChatSample, Conversation, message};
use crate::data::encode::Encoder;
use crate::data::example::{Content, Example, Task};
use crate::data::faults;
use crate::data::question::{FollowUp, SampleGroups};
use crate::data::rows::DataRow;
use crate::recipe::{DataFormat, DataRecipe, HelmetFamily, LongBenchPrompt};
use crate::units::Fault;

pub(in crate::data) struct ExampleReader<'a> {
    recipe: &'a DataRecipe,
    pub(in crate::data) format: DataFormat,
    task: &'a Task,
    encoder: &'a Encoder,
    /// The classes of LongBench v2's letters, where the head has classes.
    letters: Option<LetterClasses>,
    /// Whether a prompt is a message of the user, as the model has a chat template.
    has_template: bool,
}

impl<'a> ExampleReader<'a> {
    /// # Errors
    /// The recipe contradicts the format; the format needs a tokenizer and there is none, or the labels of the head are not its tokens; or
    /// the format has no classes, which the head asks for.
    pub(in crate::data) fn new(
        recipe: &'a DataRecipe,
        format: DataFormat,
        task: &'a Task,
        encoder: &'a Encoder,
    ) -> Result<Self, Fault> {
        if let Some(contradiction) = recipe.contradiction(format) {
            return Err(Fault::data(contradiction.message, contradiction.hint));
        }
        let mut reader = Self { recipe, format, task, encoder, letters: None, has_template: false };
        match (format, task, encoder.tokenizer.as_ref()) {
            (DataFormat::Tokens, ..) => {}
            (_, _, None) => return Err(faults::no_tokenizer("text data")),
            (DataFormat::LongBenchV2, Task::Classify(classes), Some(tokenizer)) => {
                reader.letters = Some(longbench_v2::classes_of_letters(classes, tokenizer)?);
            }
            (DataFormat::Ruler | DataFormat::Helmet, Task::Classify(_), _) => return Err(no_classes(format)),
            (_, Task::Classify(_), _) if format.is_chat() => return Err(no_classes(format)),
            (DataFormat::LongBenchV2 | DataFormat::Helmet, Task::NextToken, _) if reader.is_message() => {
                reader.has_template = encoder.chat.has_template()?;
            }
            _ => {}
        }
        Ok(reader)
    }

    /// All that decides what it makes of a row, key by key.
    pub(in crate::data) fn identity(&self) -> Value {
        let DataRecipe { prompt, max_prompt_tokens, family, .. } = self.recipe;
        let classes = match self.task {
            Task::NextToken => Value::Null,
            Task::Classify(classes) => classes.identity(),
        };
        json!({
            "format": self.format.name(), "classes": classes, "prompt": prompt.map(LongBenchPrompt::name),
            "max_prompt_tokens": max_prompt_tokens, "family": family.map(HelmetFamily::name), "has_template": self.has_template,
        })
    }

    fn wording(&self) -> LongBenchPrompt {
        self.recipe.prompt.unwrap_or(LongBenchPrompt::Upstream)
    }

    /// Whether prompts are messages where the model has a chat template.
    fn is_message(&self) -> bool {
        match self.format {
            DataFormat::Helmet => self.recipe.family.is_some_and(HelmetFamily::is_message),
            _ => !matches!(self.wording(), LongBenchPrompt::KeysValues | LongBenchPrompt::LmEval),
        }
    }

    /// The beginning of the reply that ends each prompt.
    pub(in crate::data) fn opening(&self) -> &'static str {
        match self.format {
            DataFormat::LongBenchV2 => longbench_v2::opening(self.wording()),
            _ => "",
        }
    }

    /// Refuses a text where the recipe trains messages of an assistant.
    fn refuse_text_for_messages(&self, row: &DataRow, field: &str) -> Result<(), Fault> {
        match self.recipe.chat.train_on.filter(|train_on| train_on.is_of_messages()) {
            Some(train_on) => {
                Err(row.bad(field, format!("messages, of which `data.train_on = \"{train_on}\"` speaks"), "a text"))
            }
            None => Ok(()),
        }
    }

    pub(in crate::data) fn example(&self, mut row: DataRow) -> Result<Example, Fault> {
        media::refuse(&row)?;
        let place = row.place();
        let plain =
            |content: Content| Example { place: place.clone(), content, groups: None, references: Vec::new(), follow_up: None };
        let worded = |text: TextRow, groups: Option<SampleGroups>| {
            let content = Content::Text { prompt: text.prompt, completion: text.completion };
            Example { groups, references: text.references, ..plain(content) }
        };
        let asked = |text: TextRow, groups: Option<SampleGroups>| {
            let content = as_messages(&text);
            Example { groups, references: text.references, ..plain(content) }
        };
        Ok(match (self.format, self.encoder.tokenizer.as_ref(), self.task) {
            (DataFormat::PromptCompletion, Some(tokenizer), task) => {
                if row.fields().get("prompt").is_some_and(Value::is_string) {
                    self.refuse_text_for_messages(&row, "prompt")?;
                }
                let content = prompt_completion::content(&mut row, task, tokenizer)?;
                if let Content::Text { prompt, completion } = &content {
                    self.encoder.chat.note_empty(prompt, completion);
                }
                plain(content)
            }
            (DataFormat::Text, Some(tokenizer), task) => plain(text::content(&mut row, task, tokenizer)?),
            // As TRL has it: a row of plain text among conversations, all of which is trained.
            (DataFormat::Messages, Some(tokenizer), task) if !row.has("messages") && row.has("text") => {
                self.refuse_text_for_messages(&row, "text")?;
                plain(text::content(&mut row, task, tokenizer)?)
            }
            (DataFormat::Messages, ..) => plain(conversation(chat::messages(&mut row)?)),
            (DataFormat::ShareGpt, ..) => plain(conversation(chat::sharegpt(&mut row, &self.recipe.chat.roles)?)),
            (DataFormat::Alpaca, ..) => plain(conversation(chat::alpaca(&mut row)?)),
            (DataFormat::Ruler, ..) => worded(ruler::text(&mut row)?, None),
            (DataFormat::Helmet, ..) => {
                let (text, is_message) = helmet::text(&mut row, self.recipe.family, self.has_template)?;
                if is_message { asked(text, None) } else { worded(text, None) }
            }
            (DataFormat::LongBenchV2, Some(_), Task::Classify(labels)) => {
                let question = LongBenchRow::read(&mut row)?;
                let (content, groups) = question.classified(&row, labels, self.letters.unwrap_or_default())?;
                Example { groups, ..plain(content) }
            }
            (DataFormat::LongBenchV2, Some(tokenizer), Task::NextToken) => {
                let question = LongBenchRow::read(&mut row)?;
                let (is_message, max_tokens) = (self.has_template, self.recipe.max_prompt_tokens);
                let behind = question.behind_thoughts(self.wording());
                let follow_up = behind.map(|(before, after)| FollowUp { before, after, is_message, max_tokens });
                let (mut text, groups) = question.worded(self.wording());
                if let Some(most) = max_tokens {
                    text.prompt = tokenizer.cut_as_upstream(text.prompt, most)?;
                }
                let example = if is_message { asked(text, groups) } else { worded(text, groups) };
                Example { follow_up, ..example }
            }
            _ => plain(tokens::content(&mut row, self.task, self.encoder.vocab_size)?),
        })
    }
}

fn no_classes(format: DataFormat) -> Fault {
    let message = format!("`data.format = \"{format}\"` has no classes, which the head asks for");
    Fault::data(message, "use `head.kind = \"next_token\"`, or rows with `prompt` and `label`")
}

fn conversation(sample: ChatSample) -> Content {
    Content::Chat(Box::new(sample))
}

/// A prompt as a message of the user, and its completion as the reply.
fn as_messages(text: &TextRow) -> Content {
    let messages = vec![message("user", &text.prompt), message("assistant", &text.completion)];
    let conversation = Conversation { messages, ..Conversation::default() };
    Content::Chat(Box::new(ChatSample { conversation, trains: vec![None, None], prompt: Some(1) }))
}
