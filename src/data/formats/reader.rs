//! From a row to its example, by the format.

use super::longbench_v2::{self, LetterClasses, LongBenchRow};
use super::text_row::TextRow;
use super::{helmet, prompt_completion, ruler, text, tokens};
use crate::data::chat_template::{ChatTemplate, Message};
use crate::data::error::DataError;
use crate::data::example::{Content, Example, Task};
use crate::data::question::SampleGroups;
use crate::data::rows::DataRow;
use crate::data::tokenizer::Tokenizer;
use crate::recipe::{DataFormat, DataRecipe, LongBenchPrompt};

/// Makes examples of rows.
pub(in crate::data) struct ExampleReader<'a> {
    recipe: &'a DataRecipe,
    pub(in crate::data) format: DataFormat,
    task: &'a Task,
    tokenizer: Option<&'a Tokenizer>,
    vocab_size: usize,
    /// The classes of LongBench v2's letters, where the head has classes.
    letters: Option<LetterClasses>,
    /// Of the model, where a prompt is a message of the user.
    template: Option<ChatTemplate>,
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
        let mut reader = Self { recipe, format, task, tokenizer, vocab_size, letters: None, template: None };
        match (format, task, tokenizer) {
            (DataFormat::Tokens, ..) => {}
            (_, _, None) => return Err(DataError::NoTokenizer { what: "text data" }),
            (DataFormat::LongBenchV2, Task::Classify(classes), Some(tokenizer)) => {
                reader.letters = Some(longbench_v2::classes_of_letters(classes, tokenizer)?);
            }
            (DataFormat::Ruler | DataFormat::Helmet, Task::Classify(_), _) => return Err(DataError::NoClasses { format }),
            (DataFormat::LongBenchV2, Task::NextToken, Some(tokenizer)) if reader.is_message() => {
                reader.template = ChatTemplate::load(tokenizer.dir(), None)?;
            }
            _ => {}
        }
        Ok(reader)
    }

    /// All that decides what it makes of a row, in words that change with it.
    pub(in crate::data) fn identity(&self) -> String {
        let DataRecipe { prompt, max_prompt_tokens, family, columns, .. } = self.recipe;
        let template = self.template.as_ref().map(ChatTemplate::source);
        format!("{} {:?} {prompt:?} {max_prompt_tokens:?} {family:?} {columns:?} {template:?}", self.format, self.task)
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
                match &self.template {
                    None => worded(text, groups),
                    Some(template) => {
                        let references = text.references.clone();
                        Example { groups, references, ..plain(as_messages(&text, template)?) }
                    }
                }
            }
            _ => plain(tokens::content(&mut row, self.task, self.vocab_size)?),
        })
    }
}

/// A prompt as a message of the user, and its completion as the reply.
fn as_messages(text: &TextRow, template: &ChatTemplate) -> Result<Content, DataError> {
    let messages = [Message::new("user", &text.prompt), Message::new("assistant", &text.completion)];
    let prompt = template.render(&messages[..1], true)?;
    let whole = template.render(&messages, false)?;
    let completion = whole.strip_prefix(&prompt[..]).map(str::to_owned);
    let completion = completion.ok_or_else(|| template.refused("the reply does not follow what asks for it"))?;
    Ok(Content::Rendered { prompt, completion })
}
