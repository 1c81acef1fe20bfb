//! What a model family says of itself.

use crate::model::fields::{ConfigFault, Fields};

/// A family of models, by the `model_type` of its `config.json`.
#[derive(Debug)]
pub(in crate::model) struct Family {
    pub(in crate::model) model_type: &'static str,
    /// What `config.json` goes by in the family's `architectures`.
    pub(in crate::model) architecture: &'static str,
    /// Whether the output projection is the embedding when `config.json` doesn't say.
    pub(in crate::model) tied_by_default: bool,
    /// The base of the rotary frequencies when `config.json` doesn't say.
    pub(in crate::model) default_rope_theta: f64,
    /// Queries, keys and values have a bias.
    pub(in crate::model) has_qkv_bias: bool,
    /// Each head of queries and keys is normalised before it is rotated.
    pub(in crate::model) has_qk_norm: bool,
    /// The window of a layer that slides, and which layers do when `layer_types` does not say, of so many.
    pub(in crate::model) windows: fn(Fields<'_>, usize) -> Result<SlidingLayers, ConfigFault>,
}

/// The layers of a model that have a sliding window.
#[derive(Debug)]
pub(in crate::model) struct SlidingLayers {
    /// Keys that a query sees, its own among them; `None` where no layer may slide.
    pub(in crate::model) window: Option<usize>,
    /// By layer, unless `layer_types` says otherwise.
    pub(in crate::model) slides: Vec<bool>,
}
