//! The format `sharegpt`: conversations as `ShareGPT` has them, turns with a tag in `from` and a text in `value`.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::format::RowFormat;
use crate::data::chat::{ChatSample, message, sample, shown, wrong};
use crate::data::example::Example;
use crate::data::rows::{DataRow, kind};
use crate::recipe::DataFormat;
use crate::units::Fault;

const FACTS: DataFormat = DataFormat {
    also: &["ShareGPT", "share-gpt", "share_gpt"],
    keys: &["roles"],
    has_messages: true,
    ..DataFormat::of("sharegpt", "conversations system tools documents chat_template_kwargs")
};

pub(super) const FORMAT: RowFormat = RowFormat {
    known_by: &[&["conversations"]],
    ..RowFormat::new(FACTS, |reader, row| conversation(row, &reader.recipe.chat.roles).map(Example::new))
};

/// Roles, and the tags that stand for each.
const TAGS: [(&str, &[&str]); 7] = [
    ("user", &["human", "user"]),
    ("assistant", &["gpt", "assistant", "model", "chatgpt", "bing", "bard"]),
    ("system", &["system"]),
    ("developer", &["developer"]),
    ("tool", &["tool", "observation", "function_response"]),
    ("ipython", &["ipython"]),
    ("function", &["function"]),
];

/// The tag of a call that is JSON in a text.
const CALL: &str = "function_call";

/// `roles` are those of further tags.
fn conversation(row: &mut DataRow, roles: &BTreeMap<String, String>) -> Result<ChatSample, Fault> {
    const FIELD: &str = "conversations";
    let turns = row.array(FIELD, "a list of objects with `from` and `value`")?;
    let mut messages = Vec::with_capacity(turns.len() + 1);
    if let Some(system) = row.optional_text("system")?.filter(|text| !text.is_empty()) {
        messages.push(message("system", &system));
    }
    for (index, turn) in turns.into_iter().enumerate() {
        let read = role_message(turn, roles).map_err(|fault| wrong(row, FIELD, format!("turn {index} (from 0): {fault}")))?;
        messages.push(read);
    }
    sample(row, FIELD, Value::Array(messages))
}

fn role_message(turn: Value, roles: &BTreeMap<String, String>) -> Result<Value, String> {
    let Value::Object(mut turn) = turn else {
        return Err(format!("an object with `from` and `value` is expected, found {}", kind(&turn)));
    };
    let mut take =
        |one: &str, other: &str| turn.shift_remove(one).or_else(|| turn.shift_remove(other)).filter(|value| !value.is_null());
    let tag = take("from", "role").ok_or("`from` is missing")?;
    let tag = tag.as_str().ok_or_else(|| format!("`from` must be a text, found {}", shown(&tag)))?;
    let value = take("value", "content").ok_or("`value` is missing")?;
    if tag == CALL && !roles.contains_key(tag) {
        let call = value.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
        let calls = match call {
            Some(Value::Array(calls)) => calls,
            Some(call @ Value::Object(_)) => vec![call],
            _ => return Err(format!("the `value` of `{CALL}` must be JSON in a text, found {}", shown(&value))),
        };
        let calls: Vec<Value> = calls.into_iter().map(|function| json!({"type": "function", "function": function})).collect();
        let head = json!({"role": "assistant", "content": "", "tool_calls": calls});
        return Ok(Value::Object(head.as_object().cloned().unwrap_or_default().into_iter().chain(turn).collect()));
    }
    let known = || TAGS.iter().find(|(_, tags)| tags.contains(&tag)).map(|(role, _)| *role);
    let Some(role) = roles.get(tag).map(String::as_str).or_else(known) else {
        let known = TAGS.iter().flat_map(|(_, tags)| *tags).copied().chain([CALL]);
        let names: Vec<&str> = known.chain(roles.keys().map(String::as_str)).collect();
        return Err(format!("`from` is `{tag}`, which is none of {}, and no tag of `data.roles`", names.join(", ")));
    };
    let head = [("role".to_owned(), Value::from(role)), ("content".to_owned(), value)];
    Ok(Value::Object(head.into_iter().chain(turn).collect()))
}
