//! From conversations to token ids and what is trained of them, by a recipe.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::{Arc, Mutex};

use chrono::NaiveDateTime;
use serde_json::{Value, json};

use super::conversation::{Conversation, message};
use super::notes::ChatNotes;
use super::spans::{ChatSample, SpannedText, mask, text_and_spans};
use super::template::TemplateFault;
use super::template_files::ChatTemplates;
use crate::data::encoded_sample::{Aim, EncodedSample};
use crate::data::faults::RowFault;
use crate::data::sample_place::SamplePlace;
use crate::data::tokenizer::Tokenizer;
use crate::native::locked;
use crate::recipe::{Boundary, ChatRecipe, DataRecipe, TemplateDate, TrainOn};
use crate::units::{Fault, abridged, quoted};

/// How texts become samples. Cheap to clone.
#[derive(Clone, Debug)]
pub(in crate::data) struct ChatEncoder {
    /// What decides, with the date where a template prints one.
    pub(in crate::data) recipe: ChatRecipe,
    templates: Arc<Result<ChatTemplates, NoTemplates>>,
    notes: Arc<Mutex<ChatNotes>>,
}

#[derive(Clone, Debug)]
struct NoTemplates {
    why: String,
    /// There is one, and it cannot be read.
    is_broken: bool,
}

impl ChatEncoder {
    /// For a recipe, with the templates of the tokenizer's folder. A template that is missing, or broken, matters where there are
    /// conversations. One that prints the date is told that of `now`, unless the recipe has another.
    pub(in crate::data) fn new(recipe: &DataRecipe, tokenizer: Option<&Tokenizer>, now: NaiveDateTime) -> Self {
        let mut chat = recipe.chat.clone();
        if recipe.train_on_prompt {
            chat.train_on = Some(TrainOn::All);
        }
        let date = chat.chat_template_date.or_else(|| now.date().and_hms_opt(0, 0, 0).map(TemplateDate));
        let templates = templates(&chat, tokenizer, date);
        if templates.as_ref().is_ok_and(ChatTemplates::print_dates) {
            chat.chat_template_date = date;
        }
        Self { recipe: chat, templates: Arc::new(templates), notes: Arc::default() }
    }

    /// All that decides what it makes of a sample, key by key; with `has_messages` also what makes texts of messages.
    pub(in crate::data) fn identity(&self, has_messages: bool) -> Value {
        let ChatRecipe {
            train_on,
            train_on_end_of_turn,
            boundary,
            chat_template: _,
            chat_template_kwargs,
            chat_template_date,
            roles,
        } = &self.recipe;
        let messages = has_messages.then(|| {
            let (templates, none) = match &*self.templates {
                Ok(templates) => (templates.identity(), None),
                Err(none) => (Value::Null, Some(&none.why)),
            };
            let date = chat_template_date.map(|date| date.0.to_string());
            json!({ "templates": templates, "no_templates": none, "date": date, "variables": chat_template_kwargs, "roles": roles })
        });
        json!({ "train_on": train_on, "train_on_end_of_turn": train_on_end_of_turn, "boundary": boundary, "messages": messages })
    }

    /// What of a model's folder decides it, by name.
    pub(in crate::data) fn origins(&self) -> BTreeMap<&'static str, String> {
        self.templates.as_ref().as_ref().map(ChatTemplates::origins).unwrap_or_default()
    }

    /// Whether there is a template; fails where it cannot be read.
    pub(in crate::data) fn has_template(&self) -> Result<bool, Fault> {
        match &*self.templates {
            Err(NoTemplates { is_broken: false, .. }) => Ok(false),
            _ => self.templates().map(|_| true),
        }
    }

    fn templates(&self) -> Result<&ChatTemplates, Fault> {
        let templates = self.templates.as_ref().as_ref().map_err(|none| no_template(&none.why))?;
        templates.compile().map_err(no_template)?;
        Ok(templates)
    }

    /// The text of a conversation. The template has written all special tokens.
    pub(in crate::data) fn text(&self, sample: &ChatSample, place: &SamplePlace) -> Result<String, Fault> {
        let text = self.templates().and_then(|templates| templates.render(&sample.conversation, false));
        text.map_err(|error| refused(error, place))
    }

    pub(in crate::data) fn encode(
        &self,
        sample: &ChatSample,
        tokenizer: &Tokenizer,
        place: &SamplePlace,
    ) -> Result<EncodedSample, Fault> {
        let is_all = self.recipe.train_on == Some(TrainOn::All);
        let default = if sample.prompt.is_some() { TrainOn::Completion } else { TrainOn::Assistant };
        let train_on = self.recipe.train_on.unwrap_or(default);
        let tokens = |text: &str| {
            let (ids, offsets) = tokenizer.encode_with_offsets(text)?;
            Ok(offsets.into_iter().zip(ids).map(|((start, end), id)| (start..end, tokenizer.is_added(id))).collect())
        };
        let template = self.templates().and_then(|templates| templates.of(&sample.conversation));
        let found = template.and_then(|template| text_and_spans(template, sample, train_on, &tokens));
        let SpannedText { text, spans, prompt, is_rewritten } = found.map_err(|error| refused(error, place))?;
        let (ids, offsets) = tokenizer.encode_with_offsets(&text)?;
        let mut is_trained = mask(&offsets, &spans);
        let mut notes = ChatNotes {
            has_conversations: true,
            is_rewritten,
            doubled_bos: self.doubled_bos(&ids, tokenizer)?,
            ..ChatNotes::default()
        };
        for span in &spans {
            let end = offsets.partition_point(|&(start, _)| start < span.end);
            let is_blank = |at: usize| text.get(offsets[at].0..offsets[at].1).is_some_and(|part| part.trim().is_empty());
            let last = (0..end).rev().find(|&at| !is_blank(at)).filter(|&at| is_trained[at] && tokenizer.is_added(ids[at]));
            let Some(last) = last.filter(|&at| offsets[at].0 >= span.start) else { continue };
            if self.recipe.train_on_end_of_turn || is_all {
                notes.ends_are_trained = true;
            } else {
                is_trained[last..end].fill(false);
            }
        }
        notes.ends_are_trained |= is_all;
        locked(&self.notes).add(notes);
        let leading = is_trained.iter().take_while(|&&trained| !trained).count();
        let prompt = prompt.map_or(0, |end| offsets.partition_point(|&(_, token_end)| token_end <= end));
        Ok(EncodedSample::new(ids, leading.max(prompt), Aim::Tokens(is_trained)))
    }

    /// The tokens of a prompt and its completion, and the token that ends a text.
    pub(in crate::data) fn encode_pair(
        &self,
        prompt: &str,
        completion: &str,
        tokenizer: &Tokenizer,
    ) -> Result<EncodedSample, Fault> {
        let mut alone = tokenizer.encode_prompt(prompt)?;
        let eos = tokenizer.eos()?;
        let (mut ids, prompt, border) = match self.recipe.boundary {
            Boundary::Separate => {
                let prompt = alone.len();
                alone.extend(tokenizer.encode(completion)?);
                (alone, prompt, None)
            }
            Boundary::Joined => {
                let end = tokenizer.decode_with_special(&[eos])?;
                let end = if completion.ends_with(&end) { "" } else { &end };
                let ids = tokenizer.encode_prompt(&[prompt, completion, end].concat())?;
                let common = alone.iter().zip(&ids).take_while(|(one, other)| one == other).count();
                let mut border = None;
                if common < alone.len() {
                    let shown = |ids: &[u32]| {
                        let text = ids.get(common).map(|&id| tokenizer.token_text(id)).transpose()?;
                        Ok::<_, Fault>(format!("{:?}", text.unwrap_or_default()))
                    };
                    let shown = Some((shown(&alone)?, shown(&ids)?));
                    locked(&self.notes).add(ChatNotes { border: shown, ..ChatNotes::default() });
                    border = Some(text_from(&alone, common, tokenizer)?);
                }
                (ids, common, border)
            }
        };
        // The completion may bring it.
        if ids.len() == prompt || ids.last() != Some(&eos) {
            ids.push(eos);
        }
        let first = if self.recipe.train_on == Some(TrainOn::All) { 0 } else { prompt };
        let last = ids.len() - usize::from(!self.recipe.train_on_end_of_turn);
        let is_trained = (0..ids.len()).map(|index| (first..last).contains(&index)).collect();
        Ok(EncodedSample { border, ..EncodedSample::new(ids, prompt, Aim::Tokens(is_trained)) })
    }

    /// The tokens of a message of the user, and of what the assistant's reply begins with.
    pub(in crate::data) fn asked(&self, text: &str, tokenizer: &Tokenizer) -> Result<Vec<u32>, Fault> {
        let variables = self.recipe.variables()?;
        let conversation = Conversation { messages: vec![message("user", text)], variables, ..Conversation::default() };
        let text = self.templates()?.render(&conversation, true)?;
        Ok(tokenizer.encode_with_offsets(&text)?.0)
    }

    pub(in crate::data) fn take_notes(&self) -> ChatNotes {
        std::mem::take(&mut *locked(&self.notes))
    }

    /// Counts a pair without a prompt, or without a completion.
    pub(in crate::data) fn note_empty(&self, prompt: &str, completion: &str) {
        let empty = [prompt, completion].map(|text| usize::from(text.trim().is_empty()));
        locked(&self.notes).add(ChatNotes { empty, ..ChatNotes::default() });
    }

    /// The text of the token that begins a text, where it stands there twice.
    fn doubled_bos(&self, ids: &[u32], tokenizer: &Tokenizer) -> Result<Option<String>, Fault> {
        let [first, second, ..] = ids else { return Ok(None) };
        let bos = self.templates.as_ref().as_ref().ok().and_then(ChatTemplates::bos);
        let Some(bos) = bos.filter(|_| first == second && tokenizer.is_added(*first)) else { return Ok(None) };
        Ok(Some(tokenizer.decode_with_special(&[*first])?).filter(|text| text == bos))
    }
}

fn templates(chat: &ChatRecipe, tokenizer: Option<&Tokenizer>, date: Option<TemplateDate>) -> Result<ChatTemplates, NoTemplates> {
    let missing = |why: &str| NoTemplates { why: why.to_owned(), is_broken: false };
    let tokenizer = tokenizer.ok_or_else(|| missing("without a tokenizer there is no chat template"))?;
    let wanted = chat.chat_template.as_ref().map(|choice| &choice.0[..]);
    match ChatTemplates::find(tokenizer.dir(), wanted, date.map(|date| date.0)) {
        Ok(Some(templates)) => Ok(templates),
        Ok(None) => Err(missing(&format!("the model of `{}` has no chat template", tokenizer.dir().display()))),
        Err(error) => Err(NoTemplates { why: error.to_string(), is_broken: true }),
    }
}

/// The text of all but the first `count` tokens, as it stands in that of all of them.
fn text_from(ids: &[u32], count: usize, tokenizer: &Tokenizer) -> Result<String, Fault> {
    let (all, first) = (tokenizer.decode(ids)?, tokenizer.decode(&ids[..count])?);
    // A character that is split over both belongs to the second.
    let first = first.trim_end_matches(char::REPLACEMENT_CHARACTER);
    Ok(all.strip_prefix(first).unwrap_or_default().to_owned())
}

/// What a template says, with the sample.
fn refused(error: Fault, place: &SamplePlace) -> Fault {
    let Some(TemplateFault { place: template, message }) = error.payload::<TemplateFault>() else { return error };
    let hint = if message.starts_with("message ") {
        "train on the last answer with `data.train_on = \"last\"`, or name a template with `{% generation %}` tags in `data.chat_template`"
    } else {
        "correct the messages, or name another template in `data.chat_template`"
    };
    let message = format!("{place}: the chat template of `{}`: {}", quoted(template), abridged(message));
    RowFault::bad(place.clone(), message, hint)
}

fn no_template(why: impl Display) -> Fault {
    let message = format!("conversations need a chat template: {}", abridged(why));
    Fault::data(message, "name one in `data.chat_template`: a file, or its text")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::fixtures::{Fixture, tokenizer};
    use crate::recipe::TemplateChoice;

    #[test]
    fn what_prints_the_date_is_another_the_next_day() {
        let mut recipe = Fixture::new("messages", "").recipe;
        let at = |recipe: &DataRecipe, time: &str| {
            let time = NaiveDateTime::parse_from_str(time, "%Y-%m-%d %H:%M").unwrap();
            ChatEncoder::new(recipe, Some(&tokenizer()), time)
        };
        let today = |recipe: &DataRecipe| at(recipe, "2026-11-22 14:05").identity(true);
        recipe.chat.chat_template = Some(TemplateChoice("{{ strftime_now('%d %b') }}{{ messages[0].content }}".to_owned()));
        assert_eq!(today(&recipe), at(&recipe, "2026-11-22 23:59").identity(true));
        assert_ne!(today(&recipe), at(&recipe, "2026-11-23 00:00").identity(true));
        let date = at(&recipe, "2026-11-22 14:05").recipe.chat_template_date;
        let pinned = DataRecipe { chat: ChatRecipe { chat_template_date: date, ..recipe.chat.clone() }, ..recipe.clone() };
        assert_eq!(at(&pinned, "2026-11-29 00:00").identity(true), today(&recipe));
        recipe.chat.chat_template = Some(TemplateChoice("{{ messages[0].content }}".to_owned()));
        assert_eq!(today(&recipe), at(&recipe, "2026-11-23 00:00").identity(true));
    }
}
