//! What rows of all formats of conversations have in common: a list of messages, and what else a row says of them.

use serde_json::{Map, Value};

use super::conversation::{Conversation, tools_of};
use super::spans::ChatSample;
use crate::data::faults::RowFault;
use crate::data::rows::{DataRow, kind};
use crate::units::{Fault, abridged, quoted};

pub(in crate::data) fn is_conversational(prompt: &Value) -> bool {
    prompt.as_array().is_some_and(|messages| messages.iter().any(Value::is_object))
}

pub(in crate::data) fn prompt_and_completion(row: &mut DataRow, prompt: Value) -> Result<ChatSample, Fault> {
    let completion = match row.require("completion")? {
        Value::Array(messages) if !messages.is_empty() => messages,
        other => return Err(row.bad("completion", "a list of messages, as `prompt` is", shown(&other))),
    };
    let Value::Array(mut messages) = prompt else { return Err(row.bad("prompt", "a list of messages", kind(&prompt))) };
    let count = messages.len();
    messages.extend(completion);
    Ok(ChatSample { prompt: Some(count), ..sample(row, "prompt", Value::Array(messages))? })
}

pub(in crate::data) fn sample(row: &mut DataRow, field: &'static str, mut messages: Value) -> Result<ChatSample, Fault> {
    let mut trains = Vec::new();
    for (index, message) in messages.as_array_mut().into_iter().flatten().enumerate() {
        let flag = message.as_object_mut().map_or(Ok(None), taken_flag);
        trains.push(flag.map_err(|fault| wrong(row, field, format!("message {index} (from 0): {fault}")))?);
    }
    let mut conversation = Conversation::of(messages).map_err(|fault| wrong(row, field, fault))?;
    if let Some(tools) = row.take("tools") {
        conversation.tools = tools_of(tools).map_err(|fault| wrong(row, "tools", fault))?;
    }
    if let Some(documents) = row.take("documents") {
        let is_list = documents.as_array().is_some_and(|all| all.iter().all(Value::is_object));
        if !is_list {
            return Err(wrong(row, "documents", format!("a list of objects is expected, found {}", shown(&documents))));
        }
        conversation.documents = Some(documents);
    }
    if let Some(variables) = row.take("chat_template_kwargs") {
        match variables {
            Value::Object(variables) => conversation.variables = variables,
            other => return Err(row.bad("chat_template_kwargs", "an object", kind(&other))),
        }
    }
    Ok(ChatSample { conversation, trains, prompt: None })
}

pub(in crate::data) fn wrong(row: &DataRow, field: &'static str, fault: String) -> Fault {
    let message = format!("{}: field `{}`: {}", row.place(), quoted(field), abridged(fault));
    let hint =
        "correct the messages, check `data.format` and `data.roles`, or leave such rows out with `data.on_bad_row = \"drop\"`";
    RowFault::bad(row.place(), message, hint)
}

/// Takes out whether a message is trained: `train`, or `weight`.
fn taken_flag(message: &mut Map<String, Value>) -> Result<Option<bool>, String> {
    let train = match message.shift_remove("train") {
        None | Some(Value::Null) => None,
        Some(Value::Bool(train)) => Some(train),
        Some(other) => return Err(format!("`train` must be true or false, found {}", shown(&other))),
    };
    let weight = match message.shift_remove("weight") {
        None | Some(Value::Null) => None,
        Some(weight) => match weight.as_f64() {
            Some(0.0) => Some(false),
            Some(1.0) => Some(true),
            _ => return Err(format!("`weight` must be 0 or 1, found {}", shown(&weight))),
        },
    };
    match (train, weight) {
        (Some(train), Some(weight)) if train != weight => Err(format!("`train` is {train}, and `weight` {}", u8::from(weight))),
        _ => Ok(train.or(weight)),
    }
}

pub(in crate::data) fn shown(value: &Value) -> String {
    let text = value.to_string();
    if text.len() > 40 { kind(value).to_owned() } else { text }
}
