//! Prompts that are conversations, as commands and requests have them in the fields of a JSON object.

use serde_json::Value as Json;

use super::conversation::{Conversation, tools_of};
use super::template_files::ChatTemplates;
use crate::units::Fault;

/// A conversation whose text a model goes on with.
#[derive(Debug)]
pub struct ChatPrompt {
    conversation: Conversation,
    adds_generation_prompt: bool,
    continues_final_message: bool,
}

impl ChatPrompt {
    /// `messages`, which stand in the field `name`, and what else Transformers' `apply_chat_template` is told, in fields that `take` takes
    /// out of an object; what they do not say, `told` does. The error is the name of a field, and a message with it.
    pub fn from_fields(
        name: &str,
        messages: Json,
        told: Conversation,
        mut take: impl FnMut(&str) -> Option<Json>,
    ) -> Result<Self, (String, String)> {
        let wrong = |field: &str, fault: &str| (field.to_owned(), format!("`{field}`: {fault}"));
        let Conversation { messages, written, .. } = Conversation::of(messages).map_err(|fault| wrong(name, &fault))?;
        let mut conversation = Conversation { messages, written, ..told };
        let mut take = |field: &str| take(field).filter(|value| !value.is_null());
        if let Some(tools) = take("tools") {
            conversation.tools = tools_of(tools).map_err(|fault| wrong("tools", &fault))?;
        }
        conversation.documents = take("documents");
        match take("chat_template_kwargs") {
            None => {}
            Some(Json::Object(own)) => conversation.variables.extend(own),
            Some(_) => return Err(wrong("chat_template_kwargs", "an object is expected")),
        }
        let mut flag = |field: &str| {
            take(field).map(|value| value.as_bool().ok_or_else(|| wrong(field, "true or false is expected"))).transpose()
        };
        let continues_final_message = flag("continue_final_message")?.unwrap_or(false);
        let adds_generation_prompt = flag("add_generation_prompt")?.unwrap_or(!continues_final_message);
        if continues_final_message && adds_generation_prompt {
            let message = "`continue_final_message` and `add_generation_prompt` exclude each other";
            return Err(("continue_final_message".to_owned(), message.to_owned()));
        }
        Ok(Self { conversation, adds_generation_prompt, continues_final_message })
    }

    pub fn render(&self, templates: &ChatTemplates) -> Result<String, Fault> {
        let template = templates.of(&self.conversation)?;
        if self.continues_final_message {
            template.render_to_continue(&self.conversation)
        } else {
            template.render(&self.conversation, self.adds_generation_prompt)
        }
    }
}
