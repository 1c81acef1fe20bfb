//! What replies have in common: their head, what was used, and how the cache stood.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::texts::PromptTexts;

#[derive(Clone, Debug)]
pub(super) struct ReplyHead {
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
}

static NEXT: AtomicU64 = AtomicU64::new(0);

impl ReplyHead {
    /// The head of a reply whose number begins with `kind`.
    pub(super) fn new(kind: &str, model: &str) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let id = format!("{kind}-{created:x}-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        Self { id, created, model: model.to_owned() }
    }

    pub(super) fn with(&self, object: &str, choices: &[Value]) -> Value {
        json!({ "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices })
    }
}

/// Tokens that were read and written.
pub(super) fn usage(prompt_tokens: usize, completion_tokens: usize) -> Value {
    json!({
        "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    })
}

/// A whole reply: what was used, and how the cache stood.
pub(super) fn whole(mut reply: Value, prompts: &[Vec<u32>], all: &[PromptTexts], cache: &Value) -> Value {
    let texts = || all.iter().flat_map(|prompt| &prompt.texts);
    reply["usage"] = usage(prompts.iter().map(Vec::len).sum(), texts().map(|text| text.ids.len()).sum());
    reply["kvtune"] = cache.clone();
    reply["kvtune"]["evicted"] = json!(texts().map(|text| text.evicted).sum::<usize>());
    reply
}
