//! What differs between model families, and only that: one small file each, and one line in [`FAMILIES`].

mod layers;
mod qwen2;
mod rope;

pub(super) use layers::{MAX_HIDDEN, layers};

use super::fields::{ConfigFault, Fields};

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
    /// Queries, keys and values have a bias.
    pub(super) has_qkv_bias: bool,
    /// Each head of queries and keys is normalised before it is rotated.
    pub(super) has_qk_norm: bool,
    /// The window of a layer that slides, and which layers do when `layer_types` does not say, of so many.
    pub(super) windows: fn(Fields<'_>, usize) -> Result<SlidingLayers, ConfigFault>,
}

/// The layers of a model that have a sliding window.
#[derive(Debug)]
pub(super) struct SlidingLayers {
    /// Keys that a query sees, its own among them; `None` where no layer may slide.
    pub(super) window: Option<usize>,
    /// By layer, unless `layer_types` says otherwise.
    pub(super) slides: Vec<bool>,
}

/// Finds a family by its `model_type`.
pub(super) fn find(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().copied().find(|family| family.model_type == model_type)
}

/// The `model_type`s that are known.
pub(super) fn known() -> Vec<&'static str> {
    FAMILIES.iter().map(|family| family.model_type).collect()
}
