//! `/v1/responses`: the same as a chat, as OpenAI's newer protocol asks for it; as far as text goes, and nothing is stored.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::ApiError;
use super::app_state::AppState;
use super::fields::{BodyFields, LENGTHS};
use super::job::gather;
use super::response_reply::ResponseReply;
use super::tokens::text_of;
use crate::data::message;
use crate::generation::LikelihoodsOf;

pub(super) async fn responses(State(served): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (mut fields, permit) = served.fields(request).await?;
    served.check_model(&mut fields)?;
    refuse_unsupported(&mut fields)?;
    let streams = fields.flag("stream", false)?;
    // The end of a stream tells what was used in any case.
    fields.tells_usage()?;
    let max_new_tokens = fields.count("max_output_tokens", 1..=served.prompts.most)?;
    let instructions = fields.text("instructions")?;
    let metadata = fields.take("metadata").unwrap_or_else(|| json!({}));
    if !metadata.as_object().is_some_and(|texts| texts.values().all(Value::is_string)) {
        return Err(ApiError::field("metadata", "`metadata` must be an object of texts"));
    }
    let mut reply = json!({ "instructions": instructions, "max_output_tokens": max_new_tokens, "metadata": metadata });
    let (fields, prompt) = served
        .read_apart(permit, move |reader| {
            let messages = messages(&mut fields, instructions.as_deref())?;
            let prompt = reader.rendered(messages, "input", &mut fields)?;
            Ok((fields, prompt))
        })
        .await?;
    let mut rules = fields.rules(&served.rules)?;
    rules.max_new_tokens = max_new_tokens;
    served.let_end_by_itself(&mut rules, prompt.len());
    let sampling = &rules.sampling;
    reply["temperature"] = json!(if sampling.do_sample { sampling.temperature } else { 0.0 });
    reply["top_p"] = json!(sampling.top_p);
    let reply = ResponseReply::new(&served, reply, prompt.len());
    let answers = served.ask(&[prompt], &rules, 1, LikelihoodsOf::default()).map_err(|error| error.about("input"))?;
    if streams {
        return Ok(reply.stream(&served, answers));
    }
    let all = served.in_time(gather(answers)).await?;
    Ok(Json(reply.ended(&all[0].texts[0])).into_response())
}

/// Refuses what would need a store, calls of tools, another form of text, or is called otherwise here.
fn refuse_unsupported(fields: &mut BodyFields) -> Result<(), ApiError> {
    for name in ["previous_response_id", "conversation"] {
        if fields.take(name).is_some() {
            let message = format!("there is no `{name}`, as nothing is stored: send the whole conversation as `input`");
            return Err(ApiError::field(name, message));
        }
    }
    if fields.flag("store", false)? {
        return Err(ApiError::field("store", "`store` must be false or left out: nothing is stored"));
    }
    if fields.take("tools").is_some_and(|tools| tools != json!([])) {
        let message = "`tools` must be empty: a call would stay text; /v1/chat/completions tells the chat template of tools";
        return Err(ApiError::field("tools", message));
    }
    for name in LENGTHS {
        if fields.take(name).is_some() {
            return Err(ApiError::field(name, format!("`{name}` is called `max_output_tokens` here")));
        }
    }
    let Some(text) = fields.take("text") else { return Ok(()) };
    let settings = text.as_object().ok_or_else(|| ApiError::field("text", "`text` must be an object"))?;
    for (name, value) in settings {
        let is_plain = name == "format" && *value == json!({ "type": "text" });
        // As beside a chat, how wordy an answer should be is read over.
        if !is_plain && !value.is_null() && name != "verbosity" {
            let message = "`text` may hold nothing but `verbosity`, and `format` as `{\"type\":\"text\"}`";
            return Err(ApiError::field(&format!("text.{name}"), message));
        }
    }
    Ok(())
}

/// The messages of a conversation that `instructions` begin, and `input` goes on with.
fn messages(fields: &mut BodyFields, instructions: Option<&str>) -> Result<Value, ApiError> {
    let mut messages: Vec<Value> = instructions.into_iter().map(|text| message("system", text)).collect();
    match fields.take("input") {
        Some(Value::String(text)) => messages.push(message("user", &text)),
        Some(Value::Array(items)) => {
            for (index, item) in items.iter().enumerate() {
                let wrong = |fault: String| ApiError::field("input", format!("`input[{index}]`: {fault}"));
                messages.push(message_of(item).map_err(wrong)?);
            }
        }
        Some(_) => return Err(ApiError::field("input", "`input` must be a text or a list of messages")),
        None => return Err(ApiError::field("input", "`input` is missing")),
    }
    Ok(Value::from(messages))
}

/// A message as templates know it, of an item that a client has written, or has got here as `output`.
fn message_of(item: &Value) -> Result<Value, String> {
    let fields = item.as_object().ok_or("an object with `role` and `content` is expected")?;
    if fields.get("type").is_some_and(|kind| !kind.is_null() && kind != "message") {
        return Err(format!("its `type` is {}, and only `message` is supported", fields["type"]));
    }
    only(fields, &["type", "role", "content", "id", "status", "phase"])?;
    let role = match fields.get("role").and_then(Value::as_str) {
        // OpenAI's newer name of the same; many templates leave out a role that they do not know.
        Some("developer") => "system",
        Some(role @ ("user" | "assistant" | "system")) => role,
        _ => return Err("`role` must be `user`, `assistant`, `system` or `developer`".to_owned()),
    };
    match fields.get("content") {
        Some(Value::String(text)) => Ok(message(role, text)),
        Some(Value::Array(parts)) => {
            let text = text_of(parts, &["input_text", "output_text"]);
            let text = text.ok_or("`content` has a part that is neither `input_text` nor `output_text`, with a `text`")?;
            let known = ["type", "text", "annotations", "logprobs"];
            parts.iter().filter_map(Value::as_object).try_for_each(|part| only(part, &known))?;
            Ok(message(role, &text))
        }
        _ => Err("`content` must be a text or a list of parts".to_owned()),
    }
}

/// Fails where there is a field that nobody reads.
fn only(fields: &Map<String, Value>, known: &[&str]) -> Result<(), String> {
    fields.keys().find(|name| !known.contains(&&name[..])).map_or(Ok(()), |name| Err(format!("there is no field `{name}`")))
}
