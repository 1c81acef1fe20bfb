//! Replies: what they have in common, and those that come bit by bit, as server-sent events.

use std::convert::Infallible;
use std::fmt::Display;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use chrono::Utc;
use hyper::body::Frame;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, timeout_at};

use super::ApiError;
use super::app_state::AppState;
use super::job::{Answers, PromptTexts};
use crate::generation::GenerationEvent;

/// What a reply begins with, and each event of one that comes bit by bit.
#[derive(Clone, Debug)]
pub(super) struct ReplyHead {
    id: String,
    created: i64,
    model: String,
    is_chat: bool,
}

static NEXT: AtomicU64 = AtomicU64::new(0);

impl ReplyHead {
    pub(super) fn new(is_chat: bool, model: &str) -> Self {
        let created = Utc::now().timestamp();
        let id = next_id(if is_chat { "chatcmpl-" } else { "cmpl-" }, created);
        Self { id, created, model: model.to_owned(), is_chat }
    }

    /// The whole reply to some prompts: choices, what was used, and how the cache stood.
    pub(super) fn whole(&self, choices: &[Value], prompts: &[Vec<u32>], all: &[PromptTexts], cache: &Value) -> Value {
        let texts = || all.iter().flat_map(|prompt| &prompt.texts);
        let mut reply = self.with(if self.is_chat { "chat.completion" } else { "text_completion" }, choices);
        reply["usage"] = usage(prompts.iter().map(Vec::len).sum(), texts().map(|text| text.ids.len()).sum());
        reply["kvtune"] = told_cache(cache, texts().map(|text| text.evicted).sum());
        reply
    }

    fn event(&self, choices: &[Value]) -> Value {
        self.with(if self.is_chat { "chat.completion.chunk" } else { "text_completion" }, choices)
    }

    fn with(&self, object: &str, choices: &[Value]) -> Value {
        json!({ "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices })
    }
}

/// An id that nothing else has, with what its kind begins with.
pub(super) fn next_id(kind: &str, created: i64) -> String {
    format!("{kind}{created:x}-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

fn usage(prompt_tokens: usize, completion_tokens: usize) -> Value {
    json!({
        "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    })
}

/// How the cache stood: the key `kvtune` of a reply.
pub(super) fn told_cache(cache: &Value, evicted: usize) -> Value {
    let mut told = cache.clone();
    told["evicted"] = json!(evicted);
    told
}

/// An event of a choice: a part of its text, its end, or both.
fn part(head: &ReplyHead, index: usize, text: &str, ids: &[u32], finish: Option<&str>) -> Value {
    let choice = if head.is_chat {
        let delta = if text.is_empty() { json!({}) } else { json!({ "content": text }) };
        json!({ "index": index, "delta": delta, "finish_reason": finish, "logprobs": null })
    } else {
        json!({ "index": index, "text": text, "token_ids": ids, "finish_reason": finish, "logprobs": null })
    };
    head.event(&[choice])
}

/// The first event of a choice.
fn begin(head: &ReplyHead, index: usize) -> Option<Value> {
    let delta = json!({ "role": "assistant", "content": "" });
    let choice = json!({ "index": index, "delta": delta, "finish_reason": null, "logprobs": null });
    head.is_chat.then(|| head.event(&[choice]))
}

/// The events of a reply. With `prompt_tokens` the last one tells what was used.
pub(super) fn stream(served: &Arc<AppState>, head: ReplyHead, answers: Answers, mut prompt_tokens: Option<usize>) -> Response {
    let (texts, samples) = (answers.prompts * answers.samples, answers.samples);
    streamed(served, answers, |mut events: EventStream| async move {
        (0..texts).filter_map(|index| begin(&head, index)).for_each(|first| events.send(&first));
        let (mut left, mut new_tokens) = (texts, 0);
        while left > 0 {
            let Some(next) = events.next().await else { return };
            match next {
                Ok((prompt, GenerationEvent::Token { sample, id, text, .. })) => {
                    new_tokens += 1;
                    if !(head.is_chat && text.is_empty()) {
                        events.send(&part(&head, prompt * samples + sample, &text, &[id], None));
                    }
                }
                Ok((prompt, GenerationEvent::Finished { sample, text, reason, .. })) => {
                    left -= 1;
                    events.send(&part(&head, prompt * samples + sample, &text, &[], Some(reason.name())));
                }
                Ok(_) => {}
                Err(error) => {
                    events.send(&error.to_json());
                    (left, prompt_tokens) = (0, None);
                }
            }
        }
        if let Some(prompt_tokens) = prompt_tokens {
            let mut last = head.event(&[]);
            last["usage"] = usage(prompt_tokens, new_tokens);
            events.send(&last);
        }
        events.send(&"[DONE]");
    })
}

/// What the task of a stream hears of the engine, and tells its client.
pub(super) struct EventStream {
    sender: UnboundedSender<String>,
    answers: Answers,
    deadline: Instant,
    served: Arc<AppState>,
    /// How many numbered events were sent so far.
    sent: usize,
}

impl EventStream {
    /// What comes next; `None` where the client has gone, which ends the texts with the task.
    pub(super) async fn next(&mut self) -> Option<Result<(usize, GenerationEvent), ApiError>> {
        let next = tokio::select! {
            biased;
            () = self.sender.closed() => return None,
            next = timeout_at(self.deadline, self.answers.recv()) => next,
        };
        Some(next.map_err(|_| self.served.timed_out()).flatten())
    }

    /// Sends an event. That a client has gone is heard of from `next`.
    pub(super) fn send(&self, data: &dyn Display) {
        let _ = self.sender.send(event(data));
    }

    /// Sends a named event; its JSON repeats the name as `type`, and has a `sequence_number`.
    pub(super) fn send_numbered(&mut self, kind: &str, mut data: Value) {
        data["type"] = json!(kind);
        data["sequence_number"] = json!(self.sent);
        self.sent += 1;
        let _ = self.sender.send(format!("event: {kind}\n{}", event(&data)));
    }
}

/// A reply whose events come from a task of its own.
pub(super) fn streamed<F: Future<Output = ()> + Send + 'static>(
    served: &Arc<AppState>,
    answers: Answers,
    tell: impl FnOnce(EventStream) -> F,
) -> Response {
    let (sender, receiver) = unbounded_channel::<String>();
    let deadline = served.deadline();
    tokio::spawn(tell(EventStream { sender, answers, deadline, served: Arc::clone(served), sent: 0 }));
    let headers = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-cache")];
    (headers, Body::new(Events(receiver))).into_response()
}

/// A server-sent event; JSON has no line feeds.
fn event(data: &dyn Display) -> String {
    format!("data: {data}\n\n")
}

/// The body of a reply whose parts come one by one.
struct Events(UnboundedReceiver<String>);

impl HttpBody for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|event| Some(Ok(Frame::data(event?.into()))))
    }
}
