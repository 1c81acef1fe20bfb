//! Where a message stands in the text of its conversation: found by rendering what comes before it, and that with it.

use std::ops::Range;

use super::conversation::{Conversation, role};
use super::template::ChatTemplate;
use super::template::TemplateFault;
use crate::units::Fault;

/// A conversation's text and its template, which are asked where messages stand.
#[derive(Clone, Copy)]
pub(super) struct Boundaries<'a> {
    pub(super) template: &'a ChatTemplate,
    pub(super) conversation: &'a Conversation,
    /// All of it, without a generation prompt.
    pub(super) text: &'a str,
}

impl Boundaries<'_> {
    /// In bytes, what the message `index` says: of the assistant what the model itself writes, which is what follows the generation
    /// prompt; of others with their header.
    pub(super) fn said(&self, index: usize) -> Result<Range<usize>, Fault> {
        let has_prompt = role(&self.conversation.messages[index]) == "assistant";
        self.behind(index, self.rendered(index, has_prompt)?)
    }

    /// In bytes, the message `index` with its header.
    pub(super) fn whole(&self, index: usize) -> Result<Range<usize>, Fault> {
        // Not every template renders nothing.
        let before = if index == 0 { Some(String::new()) } else { self.rendered(index, false)? };
        self.behind(index, before)
    }

    /// The end of the prompt that the first `count` messages are, with the generation prompt where the assistant is next.
    pub(super) fn prompt(&self, count: usize) -> Result<usize, Fault> {
        let messages = &self.conversation.messages;
        let is_next = messages.get(count).is_some_and(|message| role(message) == "assistant");
        let prompt = self.rendered(count, is_next)?.ok_or_else(|| self.refuse(count, "the prompt before it does not render"))?;
        if self.text.starts_with(&prompt) {
            Ok(prompt.len())
        } else {
            Err(self.refuse(count, "what follows changes how the prompt is written"))
        }
    }

    /// The message `index` behind the text before it.
    fn behind(&self, index: usize, before: Option<String>) -> Result<Range<usize>, Fault> {
        let with = self.rendered(index + 1, false)?;
        let (Some(before), Some(with)) = (before, with) else {
            return Err(self.refuse(index, "a part of the conversation does not render"));
        };
        if !with.starts_with(&before) {
            return Err(self.refuse(index, "the generation prompt is not a prefix of the conversation with the answer"));
        }
        if !self.text.starts_with(&with) {
            return Err(self.refuse(index, "what follows changes how this message is written"));
        }
        Ok(before.len()..with.len())
    }

    /// The first `count` messages, of all of them the text that is there already; `None` where the template refuses them.
    pub(super) fn rendered(&self, count: usize, has_prompt: bool) -> Result<Option<String>, Fault> {
        let messages = &self.conversation.messages;
        if count == messages.len() && !has_prompt {
            return Ok(Some(self.text.to_owned()));
        }
        rendered(self.template, self.conversation, count, has_prompt)
    }

    fn refuse(&self, index: usize, why: &str) -> Fault {
        self.template.fault(format!("message {index} (from 0): {why}"))
    }
}

/// The first `count` messages; `None` where the template refuses them.
pub(super) fn rendered(
    template: &ChatTemplate,
    conversation: &Conversation,
    count: usize,
    has_prompt: bool,
) -> Result<Option<String>, Fault> {
    match template.render_messages(conversation, &conversation.messages[..count], has_prompt) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.payload::<TemplateFault>().is_some() => Ok(None),
        Err(error) => Err(error),
    }
}
