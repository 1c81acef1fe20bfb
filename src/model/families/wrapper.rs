//! Language models inside models that also see: `config.json` has theirs under a key, and their tensors lie beside others.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use super::find;

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
    }
    Cow::Owned(inner)
}

/// What a tensor of a model that sees is called in the language model alone; `None` for one of the eyes. Published files put a prefix
/// before the whole name; Transformers 5 keeps its first part in front.
pub(in crate::model) fn own_name(stored: &str) -> Option<String> {
    if let Some(name) = stored.strip_prefix("language_model.") {
        return Some(name.to_owned());
    }
    if let Some(name) = stored.strip_prefix("model.language_model.") {
        return Some(format!("model.{name}"));
    }
    (stored == crate::model::names::OUTPUT).then(|| stored.to_owned())
}
