//! Replies of `/v1/responses`: the object as a whole, and the events that it comes in.

use std::sync::Arc;

use axum::response::Response;
use serde_json::{Value, json};

use super::app_state::AppState;
use super::job::{Answers, PromptTexts, WholeText};
use super::reply::{next_id, seconds_now, told_cache};
use super::stream::{EventStream, streamed};
use crate::generation::Finish;

/// A reply before there is any text.
pub(super) struct ResponseReply {
    begun: Value,
    /// The id of its only message.
    message: String,
    prompt_tokens: usize,
    cache: Value,
}

impl ResponseReply {
    /// With the fields that tell what was asked for.
    pub(super) fn new(served: &AppState, asked: Value, prompt_tokens: usize) -> Self {
        let created = seconds_now();
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

    pub(super) fn ended(&self, text: &WholeText) -> Value {
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

    pub(super) fn stream(self, served: &Arc<AppState>, answers: Answers) -> Response {
        streamed(served, answers, |events| self.tell(events))
    }

    async fn tell(self, mut events: EventStream) {
        self.begin(&mut events);
        let mut texts = PromptTexts::none_yet(1);
        while let Some(next) = events.next().await {
            let added = next.and_then(|(_, event)| {
                let delta = event.part().to_owned();
                Ok((delta, texts.add(event)?))
            });
            match added {
                Ok((delta, has_ended)) => {
                    if !delta.is_empty() {
                        let event = json!({ "delta": delta, "logprobs": [] });
                        self.send_of_part(&mut events, "response.output_text.delta", event);
                    }
                    if has_ended {
                        return self.end(&mut events, &texts.texts[0]);
                    }
                }
                Err(error) => return events.send_numbered("error", error.to_json()["error"].take()),
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
