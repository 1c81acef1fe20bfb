//! A chat template in the dialect of Transformers: Jinja, of which minijinja does most. What cannot be done alike is refused.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use chrono::NaiveDateTime;
use minijinja::value::Serde;
use serde_json::Value as Json;

use super::conversation::Conversation;
use super::jinja::{CompiledTemplate, TemplateText};
use super::marks::{CLOSE, OPEN, taken_out};
use super::renderer::Renderers;
use super::scan::rewrite;
use crate::metrics::is_space;
use crate::units::{Fault, abridged};

/// A chat template. It is compiled when it is first used: a process is started for that. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct ChatTemplate {
    pub(super) text: Arc<TemplateText>,
    execution: Arc<OnceLock<Result<Execution, String>>>,
    has_generation: bool,
    pub(super) place: String,
}

#[derive(Debug)]
enum Execution {
    /// In child processes, as a template can ask for more stack, memory or time than its process has.
    Children(Renderers),
    /// In this process, which is not the program that children are made of: steps are counted, memory and time are not bounded.
    Here(Box<CompiledTemplate>),
}

/// What is written behind a message that is to be continued.
const CONTINUED: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

impl ChatTemplate {
    /// A template from its text. `place` is what errors call it; `now` what it takes for the time, instead of the local one.
    pub(super) fn new(source: &str, tokens: Vec<(String, String)>, place: String, now: Option<NaiveDateTime>) -> Self {
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let now = now.map(|now| format!("{now:?}"));
        // It is strangers' text, of which this takes one look at each character and no more.
        let has_generation = rewrite(&source).has_generation;
        Self { text: Arc::new(TemplateText { source, tokens, now }), execution: Arc::default(), has_generation, place }
    }

    fn execution(&self) -> Result<&Execution, Fault> {
        let compile = || match Renderers::of(&self.text) {
            Some(renderers) => renderers.map(Execution::Children),
            None => CompiledTemplate::new(&self.text).map(|compiled| Execution::Here(Box::new(compiled))),
        };
        self.execution.get_or_init(compile).as_ref().map_err(|words| self.fault(words.clone()))
    }

    /// Whether it says itself what the assistant writes; fails where it cannot be compiled.
    pub(super) fn has_generation(&self) -> Result<bool, Fault> {
        self.execution().map(|_| self.has_generation)
    }

    /// The text of a conversation, and behind it, where `adds_generation_prompt`, what the assistant's next message begins with.
    pub(super) fn render(&self, conversation: &Conversation, adds_generation_prompt: bool) -> Result<String, Fault> {
        self.render_messages(conversation, &conversation.messages, adds_generation_prompt, false)
    }

    /// The text of some messages, with marks around that of generation tags where `is_marked`. Most templates take the arguments of calls as
    /// objects; those that join them to text refuse these, and get what was written.
    pub(super) fn render_messages(
        &self,
        of: &Conversation,
        messages: &[Json],
        adds_generation_prompt: bool,
        is_marked: bool,
    ) -> Result<String, Fault> {
        let render = |messages: &[Json]| {
            let context = self.text.context(of, messages, adds_generation_prompt, is_marked);
            let text = match self.execution()? {
                Execution::Children(renderers) => renderers.render(&context, of.size()),
                Execution::Here(compiled) => compiled.render(Serde(context).into()),
            };
            text.map_err(|words| self.fault(words))
        };
        let text = render(messages);
        let written = if text.is_err() { of.as_written(messages) } else { None };
        if let Some(written) = written { render(&written).or(text) } else { text }
    }

    /// The text of a conversation, and in bytes where the template says that the assistant writes.
    pub(super) fn render_with_spans(&self, conversation: &Conversation) -> Result<(String, Vec<Range<usize>>), Fault> {
        let text = self.render(conversation, false)?;
        match taken_out(&self.render_messages(conversation, &conversation.messages, false, true)?) {
            Some((same, spans)) if same == text => Ok((text, spans)),
            _ if [OPEN, CLOSE].iter().any(|mark| text.contains(mark)) => Err(self.fault(
                "it is given text with noncharacters of Unicode, U+FDD0 to U+FDD3, by which the assistant's text is found"
                    .to_owned(),
            )),
            _ => Err(self.fault(
                "it changes text around its generation tags, so that nobody can say where the assistant's ends".to_owned(),
            )),
        }
    }

    /// The text of a conversation up to the end of what its last message says, so that the model goes on with that message.
    pub(super) fn render_to_continue(&self, conversation: &Conversation) -> Result<String, Fault> {
        let mut messages = conversation.messages.clone();
        let nothing = || self.fault("the last message has no text that could be continued".to_owned());
        let content = messages.last_mut().and_then(|last| last.get_mut("content"));
        let text = match content {
            Some(Json::Array(parts)) => parts.iter_mut().rev().find_map(|part| part.get_mut("text")),
            content => content,
        };
        let Some(Json::String(text)) = text else { return Err(nothing()) };
        let said = text.trim().to_owned();
        text.push_str(CONTINUED);
        let rendered = self.render_messages(conversation, &messages, false, false)?;
        let at = rendered.rfind(CONTINUED.trim_end()).filter(|_| rendered.contains(&said)).ok_or_else(nothing)?;
        let cut = &rendered[..at];
        Ok(if rendered[at..].starts_with(CONTINUED) { cut.to_owned() } else { cut.trim_end_matches(is_space).to_owned() })
    }

    pub(super) fn fault(&self, message: String) -> Fault {
        TemplateFault { place: self.place.clone(), message }.into()
    }
}

/// A chat template can not be read, or refuses a conversation.
#[derive(Debug)]
pub struct TemplateFault {
    pub(super) place: String,
    /// In the template's own words, where it refuses.
    pub(super) message: String,
}

impl From<TemplateFault> for Fault {
    fn from(template: TemplateFault) -> Self {
        let TemplateFault { place, message } = &template;
        let text = format!("the chat template of `{}`: {}", abridged(place), abridged(message));
        Self::data(text, "change the messages, or name another template with `--chat-template FILE`").carrying(template)
    }
}
