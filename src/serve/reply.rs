//! What replies have in common: their head, what was used, and how the cache stood.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::job::PromptTexts;

/// What a reply begins with, and each event of one that comes bit by bit.
#[derive(Clone, Debug)]
pub(super) struct ReplyHead {
    id: String,
    created: u64,
    model: String,
    pub(super) is_chat: bool,
}

static NEXT: AtomicU64 = AtomicU64::new(0);

impl ReplyHead {
    pub(super) fn new(is_chat: bool, model: &str) -> Self {
        let created = seconds_now();
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

    pub(super) fn event(&self, choices: &[Value]) -> Value {
        self.with(if self.is_chat { "chat.completion.chunk" } else { "text_completion" }, choices)
    }

    fn with(&self, object: &str, choices: &[Value]) -> Value {
        json!({ "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices })
    }
}

pub(super) fn seconds_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// An id that nothing else has, with what its kind begins with.
pub(super) fn next_id(kind: &str, created: u64) -> String {
    format!("{kind}{created:x}-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

pub(super) fn usage(prompt_tokens: usize, completion_tokens: usize) -> Value {
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
