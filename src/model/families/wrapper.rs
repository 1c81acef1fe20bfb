//! Language models inside models that also see: `config.json` has theirs under a key, and their tensors lie beside others.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use super::family::SIZES;
use super::find;
use crate::model::names::OUTPUT;

/// Under which key a model that sees has the configuration of its language model.
const INNER: &str = "text_config";
/// Keys that count for the language model wherever they stand.
const SHARED: [&str; 4] = ["quantization_config", TIED, "dtype", "torch_dtype"];
/// The whole model has the output projection, and so the last word on it.
const TIED: &str = "tie_word_embeddings";

/// Whether a `config.json` is of a model that sees.
pub(in crate::model) fn is_wrapped(object: &Map<String, Value>) -> bool {
    object.get(INNER).is_some_and(Value::is_object)
}

/// The `config.json` of the language model alone, which is the file's own where it is of nothing else.
pub(in crate::model) fn unwrapped(object: &Map<String, Value>) -> Cow<'_, Map<String, Value>> {
    let Some(Value::Object(inner)) = object.get(INNER) else { return Cow::Borrowed(object) };
    let mut inner = inner.clone();
    for key in SHARED {
        if let Some(value) = object.get(key).filter(|_| key == TIED || inner.get(key).is_none_or(Value::is_null)) {
            inner.insert(key.into(), value.clone());
        }
    }
    if let Some(family) = inner.get("model_type").and_then(Value::as_str).and_then(find) {
        inner.insert("architectures".into(), json!([family.architecture]));
        for (key, size) in SIZES.into_iter().zip(family.class_sizes) {
            inner.entry(key).or_insert(json!(size));
        }
    }
    Cow::Owned(inner)
}

/// What a tensor of a checkpoint is called in the language model; `None` for what is none of its weights. Inside a model that sees
/// (`is_inner`), published files put a prefix before the whole name; Transformers 5 keeps its first part in front. A model that was saved
/// without its output projection lacks that part.
pub(in crate::model) fn own_name(stored: &str, is_inner: bool) -> Option<String> {
    // Old checkpoints hold what follows from the configuration.
    if stored.contains("rotary_emb.inv_freq") {
        return None;
    }
    let name = match ["model.language_model.", "language_model."].iter().find_map(|prefix| stored.strip_prefix(prefix)) {
        Some(name) if is_inner => name,
        _ if is_inner && stored != OUTPUT => return None,
        _ => stored,
    };
    let is_bare = ["embed_tokens.", "layers.", "norm."].iter().any(|part| name.starts_with(part));
    Some(if is_bare { format!("model.{name}") } else { name.to_owned() })
}
