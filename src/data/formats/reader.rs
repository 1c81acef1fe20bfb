//! From a row to its example, by the format.

use super::longbench_v2::{self, LetterClasses, LongBenchRow};
use super::text_row::TextRow;
use super::{helmet, prompt_completion, ruler, text, tokens};
use crate::data::chat::{self, ChatSample, ChatTemplates, Conversation, message};
use crate::data::error::DataError;
use crate::data::example::{Content, Example, Task};
use crate::data::question::SampleGroups;
use crate::data::rows::DataRow;
use crate::data::tokenizer::Tokenizer;
use crate::recipe::{DataFormat, DataRecipe, LongBenchPrompt, TrainOn};

/// Makes examples of rows.
pub(in crate::data) struct ExampleReader<'a> {
    recipe: &'a DataRecipe,
    pub(in crate::data) format: DataFormat,
    task: &'a Task,
    tokenizer: Option<&'a Tokenizer>,
    vocab_size: usize,
    /// The classes of LongBench v2's letters, where the head has classes.
    letters: Option<LetterClasses>,
    /// Whether a prompt is a message of the user, as the model has a chat template.
    has_template: bool,
}

impl<'a> ExampleReader<'a> {
    /// # Errors
    /// The format needs a tokenizer and there is none, the labels of the head are not its tokens, or its chat template cannot be read; or the
    /// format has no classes, which the head asks for.
    pub(in crate::data) fn new(
        recipe: &'a DataRecipe,
        format: DataFormat,
        task: &'a Task,
        tokenizer: Option<&'a Tokenizer>,
        vocab_size: usize,
    ) -> Result<Self, DataError> {
        if format.is_chat() && recipe.chat.train_on == Some(TrainOn::Completion) {
            return Err(DataError::NoCompletions { format });
        }
        let mut reader = Self { recipe, format, task, tokenizer, vocab_size, letters: None, has_template: false };
        match (format, task, tokenizer) {
            (DataFormat::Tokens, ..) => {}
            (_, _, None) => return Err(DataError::NoTokenizer { what: "text data" }),
            (DataFormat::LongBenchV2, Task::Classify(classes), Some(tokenizer)) => {
                reader.letters = Some(longbench_v2::classes_of_letters(classes, tokenizer)?);
            }
            (DataFormat::Ruler | DataFormat::Helmet, Task::Classify(_), _) => return Err(DataError::NoClasses { format }),
            (_, Task::Classify(_), _) if format.is_chat() => return Err(DataError::NoClasses { format }),
            (DataFormat::LongBenchV2, Task::NextToken, Some(tokenizer)) if reader.is_message() => {
                let wanted = recipe.chat.chat_template.as_ref().map(|choice| &choice.0[..]);
                reader.has_template = ChatTemplates::load(tokenizer.dir(), wanted, None)?.is_some();
            }
            _ => {}
        }
        Ok(reader)
    }

    /// All that decides what it makes of a row, in words that change with it.
    pub(in crate::data) fn identity(&self) -> String {
        let DataRecipe { prompt, max_prompt_tokens, family, columns, .. } = self.recipe;
        format!("{} {:?} {prompt:?} {max_prompt_tokens:?} {family:?} {columns:?} {}", self.format, self.task, self.has_template)
    }

    fn wording(&self) -> LongBenchPrompt {
        self.recipe.prompt.unwrap_or(LongBenchPrompt::Upstream)
    }

    fn is_message(&self) -> bool {
        matches!(self.wording(), LongBenchPrompt::Upstream | LongBenchPrompt::UpstreamNoContext)
    }

    /// The beginning of the reply that ends each prompt.
    pub(in crate::data) fn opening(&self) -> &'static str {
        match self.format {
            DataFormat::LongBenchV2 => longbench_v2::opening(self.wording()),
            _ => "",
        }
    }

    /// The example of a row.
    pub(in crate::data) fn example(&self, mut row: DataRow) -> Result<Example, DataError> {
        let place = row.place();
        let plain = |content: Content| Example { place: place.clone(), content, groups: None, references: Vec::new() };
        let worded = |text: TextRow, groups: Option<SampleGroups>| {
            let content = Content::Text { prompt: text.prompt, completion: text.completion };
            Example { place: place.clone(), content, groups, references: text.references }
        };
        Ok(match (self.format, self.tokenizer, self.task) {
            (DataFormat::PromptCompletion, Some(tokenizer), task) => {
                plain(prompt_completion::content(&mut row, task, tokenizer)?)
            }
            (DataFormat::Text, Some(tokenizer), task) => plain(text::content(&mut row, task, tokenizer)?),
            (DataFormat::Messages, ..) => plain(conversation(chat::messages(&mut row)?)),
            (DataFormat::ShareGpt, ..) => plain(conversation(chat::sharegpt(&mut row, &self.recipe.chat.roles)?)),
            (DataFormat::Alpaca, ..) => plain(conversation(chat::alpaca(&mut row)?)),
            (DataFormat::Ruler, ..) => worded(ruler::text(&mut row)?, None),
            (DataFormat::Helmet, ..) => worded(helmet::text(&mut row, self.recipe.family)?, None),
            (DataFormat::LongBenchV2, Some(_), Task::Classify(labels)) => {
                let question = LongBenchRow::read(&mut row)?;
                let (content, groups) = question.classified(&row, labels, self.letters.unwrap_or_default())?;
                Example { groups, ..plain(content) }
            }
            (DataFormat::LongBenchV2, Some(tokenizer), Task::NextToken) => {
                let (mut text, groups) = LongBenchRow::read(&mut row)?.worded(self.wording());
                if let Some(most) = self.recipe.max_prompt_tokens {
                    text.prompt = longbench_v2::cut(text.prompt, most, tokenizer)?;
                }
                if self.has_template {
                    let references = text.references.clone();
                    Example { groups, references, ..plain(as_messages(&text)) }
                } else {
                    worded(text, groups)
                }
            }
            _ => plain(tokens::content(&mut row, self.task, self.vocab_size)?),
        })
    }
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
