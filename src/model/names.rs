//! The names of tensors in the files of a model.

/// The name of a tensor of a layer, as `layer_tensor(3, "mlp.up_proj.weight")`.
pub(super) fn layer_tensor(layer: usize, path: &str) -> String {
    format!("model.layers.{layer}.{path}")
}

/// The layer of a tensor that has one.
pub(super) fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split_once('.')?.0.parse().ok()
}

/// What a linear is called inside a model of which the language model is a part.
pub(super) fn inner_module(linear: &str) -> String {
    linear.replacen("model.", INNER, 1)
}

/// Before the names of modules there.
pub(super) const INNER: &str = "model.language_model.";

/// The name in PEFT's files of what is trained beside a linear, as `peft_tensor("model.layers.3.mlp.up_proj", "lora_A.weight")`.
pub(super) fn peft_tensor(linear: &str, part: &str) -> String {
    format!("{PEFT_PREFIX}{linear}.{part}")
}

/// Before all names in PEFT's files.
pub(super) const PEFT_PREFIX: &str = "base_model.model.";

pub(super) const EMBEDDING_MODULE: &str = "model.embed_tokens";
/// The embedding's weight `(V, E)`.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
/// The final norm's weight `(E)`.
pub(super) const FINAL_NORM: &str = "model.norm.weight";
/// The weight `(K, E)` that scores classes in place of the output projection.
pub(super) const SCORE: &str = "score.weight";
pub(super) const OUTPUT_MODULE: &str = "lm_head";
/// The output projection's weight `(V, E)`.
pub(super) const OUTPUT: &str = "lm_head.weight";
