//! A conversation as templates see it: messages as they come, tools, documents and the caller's own variables.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use crate::data::media::part_of_media;
use crate::data::rows::kind;
use crate::units::quoted;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// Objects with `role`, mostly `content`, and whatever else the template knows.
    pub messages: Vec<Json>,
    /// The functions that the assistant may call, each a JSON schema.
    pub tools: Option<Json>,
    /// Texts that the assistant may cite.
    pub documents: Option<Json>,
    /// What else the template is told, such as `enable_thinking`.
    pub variables: Map<String, Json>,
    /// Arguments of calls that were JSON in a text, as they were written, by the numbers of message and call.
    pub written: BTreeMap<(usize, usize), String>,
}

impl Conversation {
    /// A conversation of messages from elsewhere, which may have been written for a protocol: arguments of calls that are JSON in a
    /// text become what they say. The error says what is wrong with which message.
    pub fn of(messages: Json) -> Result<Self, String> {
        let kind = kind(&messages);
        let Json::Array(mut messages) = messages else { return Err(format!("a list of messages is expected, found {kind}")) };
        if messages.is_empty() {
            return Err("there is no message".to_owned());
        }
        let mut written = BTreeMap::new();
        for (index, message) in messages.iter_mut().enumerate() {
            let placed = |fault: String| format!("message {index} (from 0): {fault}");
            check_message(message).map_err(placed)?;
            name_thoughts(message);
            let texts = parse_arguments(message).map_err(placed)?;
            written.extend(texts.into_iter().map(|(call, text)| ((index, call), text)));
        }
        Ok(Self { messages, written, ..Self::default() })
    }

    /// The first messages of this conversation with arguments as they were written, if some were texts.
    pub(super) fn as_written(&self, messages: &[Json]) -> Option<Vec<Json>> {
        let mut written = self.written.range(..(messages.len(), 0)).peekable();
        written.peek()?;
        let mut messages = messages.to_vec();
        for ((message, call), text) in written {
            if let Some(arguments) = messages[*message]["tool_calls"].get_mut(call).and_then(arguments) {
                *arguments = text.clone().into();
            }
        }
        Some(messages)
    }

    /// About as many bytes as all of it takes.
    pub(in crate::data) fn size(&self) -> usize {
        fn of(value: &Json) -> usize {
            8 + match value {
                Json::String(text) => text.len(),
                Json::Array(values) => values.iter().map(of).sum(),
                Json::Object(fields) => fields.iter().map(|(name, value)| name.len() + of(value)).sum(),
                _ => 0,
            }
        }
        let others = [&self.tools, &self.documents].into_iter().flatten();
        self.messages.iter().chain(others).chain(self.variables.values()).map(of).sum()
    }
}

pub fn message(role: &str, content: &str) -> Json {
    json!({ "role": role, "content": content })
}

pub(super) fn is_assistant(message: &Json) -> bool {
    message.get("role").and_then(Json::as_str) == Some("assistant")
}

/// Tools as a list, or as the JSON text of one; no tools are none.
pub fn tools_of(tools: Json) -> Result<Option<Json>, String> {
    let tools = match tools {
        Json::String(text) if text.trim().is_empty() => return Ok(None),
        Json::String(text) => serde_json::from_str(&text).map_err(|error| format!("its text is not JSON: {error}"))?,
        other => other,
    };
    match &tools {
        Json::Null => Ok(None),
        Json::Array(all) if all.is_empty() => Ok(None),
        Json::Array(all) if all.iter().all(Json::is_object) => Ok(Some(tools)),
        other => Err(format!("a list of objects is expected, or its JSON as text, found {}", kind(other))),
    }
}

/// Names a message's thoughts as Transformers does since 5.24: `thinking` first, which may have a value of its own, and `reasoning_content`.
fn name_thoughts(message: &mut Json) {
    let Some(fields) = message.as_object_mut() else { return };
    let names = ["reasoning_content", "thinking", "reasoning"];
    let Some(thoughts) = names.iter().find_map(|name| fields.get(*name).filter(|value| !value.is_null())).cloned() else {
        return;
    };
    let thinking = fields.shift_remove("thinking").unwrap_or_else(|| thoughts.clone());
    fields.shift_insert(0, "thinking".to_owned(), thinking);
    fields.insert("reasoning_content".to_owned(), thoughts);
}

fn check_message(message: &Json) -> Result<(), String> {
    let fields =
        message.as_object().ok_or_else(|| format!("an object with `role` and `content` is expected, found {}", kind(message)))?;
    match fields.get("role") {
        None => return Err("`role` is missing".to_owned()),
        Some(Json::String(role)) if role.is_empty() => return Err("`role` must be a text, found nothing in it".to_owned()),
        Some(Json::String(_)) => {}
        Some(other) => return Err(format!("`role` must be a text, found {}", kind(other))),
    }
    match fields.get("content") {
        None if fields.keys().all(|name| name == "role" || name == "name") => Err("`content` is missing".to_owned()),
        None | Some(Json::Null | Json::String(_)) => Ok(()),
        Some(Json::Array(parts)) => parts.iter().try_for_each(|part| match part {
            Json::Object(fields) => part_of_media(fields).map_or(Ok(()), |name| {
                Err(format!("a part of `content` is `{}`, and models are run on text alone", quoted(name)))
            }),
            Json::String(_) => Ok(()),
            other => Err(format!("a part of `content` must be an object, found {}", kind(other))),
        }),
        Some(other) => Err(format!("`content` must be a text or a list of parts, found {}", kind(other))),
    }
}

/// Reads arguments that are an object in a text, as `OpenAI`'s protocol has it; an empty text is none. The texts by the number of their call.
fn parse_arguments(message: &mut Json) -> Result<Vec<(usize, String)>, String> {
    let mut texts = Vec::new();
    let calls = message.get_mut("tool_calls").and_then(Json::as_array_mut).into_iter().flatten();
    for (index, call) in calls.enumerate() {
        let Some(arguments) = arguments(call) else { continue };
        let Some(text) = arguments.as_str() else { continue };
        let parsed = serde_json::from_str::<Json>(if text.trim().is_empty() { "{}" } else { text });
        let parsed = parsed.map_err(|error| format!("`arguments` of a tool call is a text that is not JSON: {error}"))?;
        if parsed.is_object() {
            texts.push((index, text.to_owned()));
            *arguments = parsed;
        }
    }
    Ok(texts)
}

fn arguments(call: &mut Json) -> Option<&mut Json> {
    let function = if call.get("function").is_some() { call.get_mut("function") } else { Some(call) };
    function?.get_mut("arguments")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_checked_and_arguments_are_what_they_say() {
        let call =
            |arguments: Json| json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]);
        let read = Conversation::of(call(json!("{\"b\": 1, \"a\": [null]}"))).unwrap();
        assert_eq!(read.messages, *call(json!({"b": 1, "a": [null]})).as_array().unwrap());
        assert_eq!(Conversation::of(call(json!(""))).unwrap().messages, *call(json!({})).as_array().unwrap());
        assert_eq!(Conversation::of(call(json!("[1]"))).unwrap().messages, *call(json!("[1]")).as_array().unwrap());
        let parts = |parts: Json| json!([{"role": "user", "content": parts}]);
        assert!(Conversation::of(parts(json!(["a", {"type": "text", "text": "b"}, {"text": "c"}]))).is_ok());
        for (part, name) in [
            (json!({"type": "image_url", "image_url": {"url": "x"}}), "image_url"),
            (json!({"type": "image"}), "image"),
            (json!({"type": "input_audio", "input_audio": {}}), "input_audio"),
            (json!({"type": "video"}), "video"),
            (json!({"type": "file", "file": {}}), "file"),
            (json!({"image": "x.png"}), "image"),
        ] {
            let why = format!("message 0 (from 0): a part of `content` is `{name}`, and models are run on text alone");
            assert_eq!(Conversation::of(parts(json!([{"type": "text", "text": "a"}, part]))).unwrap_err(), why);
        }
        let no_json =
            "message 0 (from 0): `arguments` of a tool call is a text that is not JSON: expected ident at line 1 column 2";
        for (messages, why) in [
            (call(json!("none")), no_json),
            (json!("hi"), "a list of messages is expected, found a string"),
            (json!([]), "there is no message"),
            (json!([3]), "message 0 (from 0): an object with `role` and `content` is expected, found a number"),
            (json!([{"role": "user", "content": "a"}, {"content": "b"}]), "message 1 (from 0): `role` is missing"),
            (json!([{"role": "user"}]), "message 0 (from 0): `content` is missing"),
            (json!([{"role": 1, "content": "a"}]), "message 0 (from 0): `role` must be a text, found a number"),
            (
                json!([{"role": "user", "content": 12}]),
                "message 0 (from 0): `content` must be a text or a list of parts, found a number",
            ),
            (
                json!([{"role": "user", "content": [1]}]),
                "message 0 (from 0): a part of `content` must be an object, found a number",
            ),
        ] {
            assert_eq!(Conversation::of(messages).unwrap_err(), why);
        }
    }

    #[test]
    fn thoughts_are_called_as_templates_read_them() {
        for name in ["reasoning_content", "thinking", "reasoning"] {
            let message = json!({"role": "assistant", "content": "a", name: "so"});
            let read = Conversation::of(json!([message])).unwrap().messages.remove(0);
            assert_eq!((&read["reasoning_content"], &read["thinking"]), (&json!("so"), &json!("so")), "{name}");
        }
        let both =
            json!([{"role": "assistant", "content": "a", "thinking": "other", "reasoning": null, "reasoning_content": "so"}]);
        let read = Conversation::of(both).unwrap().messages.remove(0).to_string();
        assert_eq!(read, r#"{"thinking":"other","role":"assistant","content":"a","reasoning":null,"reasoning_content":"so"}"#);
    }

    #[test]
    fn tools_are_a_list_or_its_text() {
        assert_eq!(tools_of(json!("[{\"a\": 1}]")).unwrap(), Some(json!([{"a": 1}])));
        assert_eq!(
            (tools_of(json!([])).unwrap(), tools_of(json!("")).unwrap(), tools_of(json!("null")).unwrap()),
            (None, None, None)
        );
        assert!(tools_of(json!("[")).unwrap_err().contains("not JSON"));
        assert_eq!(tools_of(json!(3)).unwrap_err(), "a list of objects is expected, or its JSON as text, found a number");
    }
}
