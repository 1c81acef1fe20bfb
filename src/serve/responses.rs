//! `/v1/responses`: the same as a chat, as OpenAI's newer protocol asks for it; as far as text goes, and nothing is stored.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use chrono::Utc;
use serde_json::{Map, Value, json};

use super::ApiError;
use super::app_state::AppState;
use super::fields::{BodyFields, LENGTHS};
use super::job::gather;
use super::reply::{EventStream, next_id, streamed, told_cache};
use super::tokens::text_of;
use crate::data::message;
use crate::generation::{Finish, LikelihoodsOf, WholeText};

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
        .apart(Some(permit), move |encoder| {
            let messages = messages(&mut fields, instructions.as_deref())?;
            let prompt = encoder.rendered(messages, "input", &mut fields)?;
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
        return Ok(streamed(&served, answers, |events| reply.tell(events)));
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

/// A reply before there is any text.
struct ResponseReply {
    begun: Value,
    /// The id of its only message.
    message: String,
    prompt_tokens: usize,
    cache: Value,
}

impl ResponseReply {
    /// With the fields that tell what was asked for.
    fn new(served: &AppState, asked: Value, prompt_tokens: usize) -> Self {
        let created = Utc::now().timestamp();
        let mut begun = json!({
            "id": next_id("resp_", created), "object": "response", "created_at": created, "model": served.options.name,
            "status": "in_progress", "error": null, "incomplete_details": null, "output": [], "usage": null,
            "previous_response_id": null, "store": false, "background": false, "truncation": "disabled",
            "text": { "format": { "type": "text" } }, "tools": [], "tool_choice": "auto", "parallel_tool_calls": true,
        });
        if let (Some(all), Value::Object(asked)) = (begun.as_object_mut(), asked) {
            all.extend(asked);
        }
        Self { begun, message: next_id("msg_", created), prompt_tokens, cache: served.options.cache.clone() }
    }

    fn ended(&self, text: &WholeText) -> Value {
        let mut reply = self.begun.clone();
        if is_cut(text) {
            reply["incomplete_details"] = json!({ "reason": "max_output_tokens" });
        }
        reply["status"] = json!(status(text));
        reply["output"] = json!([self.item(status(text), &[part(&text.text)])]);
        reply["usage"] = json!({
            "input_tokens": self.prompt_tokens, "input_tokens_details": { "cached_tokens": text.reused },
            "output_tokens": text.ids.len(), "output_tokens_details": { "reasoning_tokens": 0 },
            "total_tokens": self.prompt_tokens + text.ids.len(),
        });
        reply["kvtune"] = told_cache(&self.cache, text.evicted);
        reply
    }

    fn item(&self, status: &str, content: &[Value]) -> Value {
        json!({ "type": "message", "id": self.message, "role": "assistant", "status": status, "content": content })
    }

    async fn tell(self, mut events: EventStream) {
        self.begin(&mut events);
        let mut text = WholeText::default();
        while let Some(next) = events.next().await {
            let event = match next {
                Ok((_, event)) => event,
                Err(error) => return events.send_numbered("error", error.to_json()["error"].take()),
            };
            let delta = text.add(event);
            if !delta.is_empty() {
                let event = json!({ "delta": delta, "logprobs": [] });
                self.send_of_part(&mut events, "response.output_text.delta", event);
            }
            if text.reason.is_some() {
                return self.end(&mut events, &text);
            }
        }
    }

    fn begin(&self, events: &mut EventStream) {
        for kind in ["response.created", "response.in_progress"] {
            events.send_numbered(kind, json!({ "response": self.begun }));
        }
        let item = self.item("in_progress", &[]);
        events.send_numbered("response.output_item.added", json!({ "output_index": 0, "item": item }));
        self.send_of_part(events, "response.content_part.added", json!({ "part": part("") }));
    }

    fn end(&self, events: &mut EventStream, text: &WholeText) {
        let whole = self.ended(text);
        self.send_of_part(events, "response.output_text.done", json!({ "text": text.text, "logprobs": [] }));
        self.send_of_part(events, "response.content_part.done", json!({ "part": part(&text.text) }));
        events.send_numbered("response.output_item.done", json!({ "output_index": 0, "item": whole["output"][0] }));
        events.send_numbered(&format!("response.{}", status(text)), json!({ "response": whole }));
    }

    /// Sends an event of the only part of the only message.
    fn send_of_part(&self, events: &mut EventStream, kind: &str, mut event: Value) {
        event["item_id"] = json!(self.message);
        event["output_index"] = json!(0);
        event["content_index"] = json!(0);
        events.send_numbered(kind, event);
    }
}

/// Whether a text ends because it may have no more tokens.
fn is_cut(text: &WholeText) -> bool {
    text.reason == Some(Finish::Length)
}

fn status(text: &WholeText) -> &'static str {
    if is_cut(text) { "incomplete" } else { "completed" }
}

/// The only part of a message.
fn part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [] })
}
