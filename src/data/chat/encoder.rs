//! From conversations to token ids and what is trained of them, by a recipe.

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::spans::{ChatSample, mask, text_and_spans};
use super::template_files::ChatTemplates;
use crate::data::error::DataError;
use crate::data::sample_place::SamplePlace;
use crate::data::tokenizer::Tokenizer;
use crate::recipe::{Boundary, ChatRecipe, DataRecipe, TrainOn};

/// How texts become samples. Cheap to clone.
#[derive(Clone, Debug)]
pub(in crate::data) struct ChatEncoder {
    recipe: ChatRecipe,
    /// The templates, or why there are none.
    templates: Arc<Result<ChatTemplates, String>>,
    notes: Arc<Notes>,
}

/// What is worth telling, once.
#[derive(Debug, Default)]
struct Notes {
    has_conversations: AtomicBool,
    ends_are_trained: AtomicBool,
    /// The tokens at the first border of prompt and completion that is inside of a token: alone, and joined.
    border: Mutex<Option<(String, String)>>,
}

/// The tokens of a text, and which of them are trained.
pub(in crate::data) struct TrainedText {
    pub(in crate::data) ids: Vec<u32>,
    pub(in crate::data) is_trained: Vec<bool>,
}

impl ChatEncoder {
    /// For a recipe, with the templates of the tokenizer's folder. A template that is missing, or broken, matters where there are
    /// conversations.
    pub(in crate::data) fn new(recipe: &DataRecipe, tokenizer: Option<&Tokenizer>) -> Self {
        let chat = &recipe.chat;
        let wanted = chat.chat_template.as_ref().map(|choice| &choice.0[..]);
        let templates = match tokenizer {
            Some(tokenizer) => match ChatTemplates::load(tokenizer.dir(), wanted, chat.chat_template_date.map(|date| date.0)) {
                Ok(Some(templates)) => Ok(templates),
                Ok(None) => Err(format!("the model of `{}` has no chat template", tokenizer.dir().display())),
                Err(error) => Err(error.to_string()),
            },
            None => Err("without a tokenizer there is no chat template".to_owned()),
        };
        let mut chat = chat.clone();
        if recipe.train_on_prompt {
            chat.train_on = Some(TrainOn::All);
        }
        Self { recipe: chat, templates: Arc::new(templates), notes: Arc::default() }
    }

    /// All that decides what it makes of a sample, in words that change with it.
    pub(in crate::data) fn identity(&self) -> String {
        let templates = self.templates.as_ref().as_ref().map(ChatTemplates::identity);
        format!("{:?} {templates:?}", self.recipe)
    }

    /// The text of a conversation. The template has written all special tokens.
    pub(in crate::data) fn text(&self, sample: &ChatSample, place: &dyn Fn() -> SamplePlace) -> Result<String, DataError> {
        let refused = |error| refused(error, place);
        self.with_variables(sample, |sample, templates| templates.of(&sample.conversation)?.render(&sample.conversation, false))
            .map_err(refused)
    }

    /// The tokens of a conversation.
    pub(in crate::data) fn encode(
        &self,
        sample: &ChatSample,
        tokenizer: &Tokenizer,
        place: &dyn Fn() -> SamplePlace,
    ) -> Result<TrainedText, DataError> {
        let is_all = self.recipe.train_on == Some(TrainOn::All);
        let default = if sample.prompt.is_some() { TrainOn::Completion } else { TrainOn::Assistant };
        let train_on = self.recipe.train_on.unwrap_or(default);
        let (text, spans) = self
            .with_variables(sample, |sample, templates| text_and_spans(templates.of(&sample.conversation)?, sample, train_on))
            .map_err(|error| refused(error, place))?;
        let (ids, offsets) = tokenizer.encode_with_offsets(&text)?;
        let mut is_trained = mask(&offsets, &spans);
        self.notes.has_conversations.store(true, Ordering::Relaxed);
        for span in &spans {
            let end = offsets.partition_point(|&(start, _)| start < span.end);
            let is_blank = |at: usize| text.get(offsets[at].0..offsets[at].1).is_some_and(|part| part.trim().is_empty());
            let last = (0..end).rev().find(|&at| !is_blank(at)).filter(|&at| is_trained[at] && tokenizer.is_added(ids[at]));
            let Some(last) = last.filter(|&at| offsets[at].0 >= span.start) else { continue };
            if self.recipe.train_on_end_of_turn || is_all {
                self.notes.ends_are_trained.store(true, Ordering::Relaxed);
            } else {
                is_trained[last..end].fill(false);
            }
        }
        self.notes.ends_are_trained.fetch_or(is_all, Ordering::Relaxed);
        Ok(TrainedText { ids, is_trained })
    }

    /// The tokens of a prompt and its completion, and the token that ends a text.
    pub(in crate::data) fn encode_pair(
        &self,
        prompt: &str,
        completion: &str,
        tokenizer: &Tokenizer,
    ) -> Result<(TrainedText, usize), DataError> {
        let mut alone = tokenizer.encode_prompt(prompt)?;
        let eos = tokenizer.eos()?;
        let (mut ids, prompt) = match self.recipe.boundary {
            Boundary::Separate => {
                let prompt = alone.len();
                alone.extend(tokenizer.encode(completion)?);
                (alone, prompt)
            }
            Boundary::Joined => {
                let end = tokenizer.token_text(eos)?;
                let end = if completion.ends_with(&end) { "" } else { &end };
                let ids = tokenizer.encode_prompt(&[prompt, completion, end].concat())?;
                let common = alone.iter().zip(&ids).take_while(|(one, other)| one == other).count();
                if common < alone.len() {
                    self.note_border(&alone[common..], &ids[common..], tokenizer)?;
                }
                (ids, common)
            }
        };
        // The completion may bring it.
        if ids.len() == prompt || ids.last() != Some(&eos) {
            ids.push(eos);
        }
        let first = if self.recipe.train_on == Some(TrainOn::All) { 0 } else { prompt };
        let last = ids.len() - usize::from(!self.recipe.train_on_end_of_turn);
        let is_trained = (0..ids.len()).map(|index| (first..last).contains(&index)).collect();
        Ok((TrainedText { ids, is_trained }, prompt))
    }

    /// What should be told of all samples that have been encoded.
    pub(in crate::data) fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let notes = &self.notes;
        let is_set = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        if is_set(&notes.has_conversations) && self.recipe.train_on_end_of_turn && !is_set(&notes.ends_are_trained) {
            let why = "no answer's end-of-turn token is trained, so that the model does not learn to stop: the chat template writes none \
                       behind what the assistant says, or leaves it out of its `{% generation %}` tags";
            warnings.push(why.to_owned());
        }
        if let Some((alone, joined)) = notes.border.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
            warnings.push(format!(
                "`data.boundary = \"joined\"`: a prompt ends inside of a token: alone in {alone}, joined with its completion in {joined}. \
                 After the prompt alone a model meets other tokens than in training"
            ));
        }
        warnings
    }

    fn note_border(&self, alone: &[u32], joined: &[u32], tokenizer: &Tokenizer) -> Result<(), DataError> {
        let mut border = self.notes.border.lock().unwrap_or_else(PoisonError::into_inner);
        if border.is_none() {
            let shown = |ids: &[u32]| {
                ids.first().map(|&id| tokenizer.token_text(id)).transpose().map(|text| format!("{:?}", text.unwrap_or_default()))
            };
            *border = Some((shown(alone)?, shown(joined)?));
        }
        Ok(())
    }

    /// The recipe's variables are under those of the row.
    fn with_variables<T>(
        &self,
        sample: &ChatSample,
        work: impl FnOnce(&ChatSample, &ChatTemplates) -> Result<T, DataError>,
    ) -> Result<T, DataError> {
        let templates = self.templates.as_ref().as_ref().map_err(|why| DataError::NoTemplate { why: why.clone() })?;
        if self.recipe.chat_template_kwargs.0.is_empty() {
            return work(sample, templates);
        }
        let mut sample = sample.clone();
        let own = std::mem::take(&mut sample.conversation.variables);
        let fault = |error: &dyn Display| DataError::NoTemplate { why: format!("`data.chat_template_kwargs`: {error}") };
        for (name, value) in &self.recipe.chat_template_kwargs.0 {
            sample.conversation.variables.insert(name.clone(), serde_json::to_value(value).map_err(|error| fault(&error))?);
        }
        sample.conversation.variables.extend(own);
        work(&sample, templates)
    }
}

/// What a template says, with the sample.
fn refused(error: DataError, place: &dyn Fn() -> SamplePlace) -> DataError {
    match error {
        DataError::ChatTemplate { place: template, message } => DataError::Conversation { place: place(), template, message },
        other => other,
    }
}
