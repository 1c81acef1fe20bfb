//! What differs between model families, and only that: one small file each, and one line in [`FAMILIES`].

mod qwen2;

use super::config::{ConfigFault, Fields};
use super::linear::Projection;

/// The known families.
pub(super) const FAMILIES: &[&Family] = &[&qwen2::FAMILY];

/// A family of models, by the `model_type` of its `config.json`.
#[derive(Debug)]
pub(super) struct Family {
    pub(super) model_type: &'static str,
    /// What `config.json` goes by in the family's `architectures`.
    pub(super) architecture: &'static str,
    /// Whether the output projection is the embedding when `config.json` doesn't say.
    pub(super) tied_by_default: bool,
    /// The base of the rotary frequencies when `config.json` doesn't say.
    pub(super) default_rope_theta: f64,
    /// Reads what differs from `config.json`, and refuses what isn't built.
    pub(super) resolve: fn(Fields<'_>) -> Result<Variant, ConfigFault>,
}

/// How a model's layers differ from the plain decoder layer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Variant {
    /// The projections that have a bias.
    pub biased: Vec<Projection>,
    /// Each head of queries and keys is normalised before it is turned.
    pub has_qk_norm: bool,
}

/// Finds a family by its `model_type`.
pub(super) fn find(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().copied().find(|family| family.model_type == model_type)
}

/// The `model_type`s that are known.
pub(super) fn known() -> Vec<&'static str> {
    FAMILIES.iter().map(|family| family.model_type).collect()
}

/// The name of a tensor of a layer, as `layer_tensor(3, "mlp.up_proj.weight")`.
pub(super) fn layer_tensor(layer: usize, path: &str) -> String {
    format!("model.layers.{layer}.{path}")
}

/// The embedding's weight `(V, E)`.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
/// The final norm's weight `(E)`.
pub(super) const FINAL_NORM: &str = "model.norm.weight";
/// The output projection's weight `(V, E)`.
pub(super) const OUTPUT: &str = "lm_head.weight";
