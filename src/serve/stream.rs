//! Replies that come bit by bit, as server-sent events.

use std::convert::Infallible;
use std::fmt::Display;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use hyper::body::Frame;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::{Instant, timeout_at};

use super::app_state::AppState;
use super::job::{Answers, TextEvent, gone};
use super::reply::{ReplyHead, usage};

/// An event of a choice: a part of its text, its end, or both.
fn part(head: &ReplyHead, index: usize, text: &str, finish: Option<&str>) -> Value {
    let choice = if head.is_chat {
        let delta = if text.is_empty() { json!({}) } else { json!({ "content": text }) };
        json!({ "index": index, "delta": delta, "finish_reason": finish, "logprobs": null })
    } else {
        json!({ "index": index, "text": text, "finish_reason": finish, "logprobs": null })
    };
    head.event(&[choice])
}

/// The first event of a choice.
fn begin(head: &ReplyHead, index: usize) -> Option<Value> {
    let delta = json!({ "role": "assistant", "content": "" });
    let choice = json!({ "index": index, "delta": delta, "finish_reason": null, "logprobs": null });
    head.is_chat.then(|| head.event(&[choice]))
}

/// The events of a reply with so many prompts and texts of each. A client that goes away ends the task below, and with it the
/// texts. With `prompt_tokens` the last event tells what was used.
pub(super) fn stream(
    served: &Arc<AppState>,
    head: ReplyHead,
    mut answers: Answers,
    prompts: usize,
    samples: usize,
    prompt_tokens: Option<usize>,
) -> Response {
    let (sender, receiver) = unbounded_channel::<String>();
    let (deadline, served) = (Instant::now() + served.limits.timeout, served.clone());
    tokio::spawn(async move {
        let send = |value: Value| sender.send(event(&value)).is_ok();
        let mut is_there = (0..prompts * samples).filter_map(|index| begin(&head, index)).all(send);
        let (mut left, mut new_tokens) = (prompts * samples, 0);
        while left > 0 && is_there {
            let next = tokio::select! {
                next = timeout_at(deadline, answers.recv()) => next,
                () = sender.closed() => return,
            };
            let answer = next.map_err(|_| served.timed_out()).and_then(|next| next.ok_or_else(gone));
            is_there = match answer {
                Ok((_, TextEvent::Prompt(_))) => true,
                Ok((prompt, TextEvent::Token { sample, text, .. })) => {
                    new_tokens += 1;
                    text.is_empty() || send(part(&head, prompt * samples + sample, &text, None))
                }
                Ok((prompt, TextEvent::Finished { sample, text, reason, .. })) => {
                    left -= 1;
                    send(part(&head, prompt * samples + sample, &text, Some(reason.name())))
                }
                Ok((_, TextEvent::Failed(error))) | Err(error) => {
                    left = 0;
                    send(error.to_json())
                }
            };
        }
        if let Some(prompt_tokens) = prompt_tokens.filter(|_| is_there) {
            let mut last = head.event(&[]);
            last["usage"] = usage(prompt_tokens, new_tokens);
            send(last);
        }
        let _ = sender.send(event(&"[DONE]"));
    });
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
