//! What a model family says of itself.

use crate::model::fields::{ConfigFault, Fields};
use crate::model::spec::ExpertsSpec;

/// A family of models, by the `model_type` of its `config.json`. What most families have in common is [`Family::USUAL`].
#[derive(Debug)]
pub(in crate::model) struct Family {
    pub(in crate::model) model_type: &'static str,
    /// What `config.json` goes by in the family's `architectures`.
    pub(in crate::model) architecture: &'static str,
    /// Whether the output projection is the embedding when `config.json` doesn't say.
    pub(in crate::model) tied_by_default: bool,
    /// The base of the rotary frequencies when `config.json` doesn't say.
    pub(in crate::model) default_rope_theta: f64,
    /// The epsilon of the norms when `config.json` doesn't say.
    pub(in crate::model) default_norm_eps: f64,
    /// Heads of keys and values when `config.json` doesn't say; as many as there are query heads where `None`.
    pub(in crate::model) default_kv_heads: Option<usize>,
    /// Channels of a head when `config.json` doesn't say; an equal share of the residual stream's where `None`.
    pub(in crate::model) default_head_dim: Option<usize>,
    /// Each head of queries and keys is normalised before it is rotated.
    pub(in crate::model) has_qk_norm: bool,
    /// Probabilities of dropout that the family knows: their keys, and what they are when `config.json` doesn't say.
    pub(in crate::model) dropouts: &'static [(&'static str, f64)],
    /// Which linears have a bias.
    pub(in crate::model) biases: fn(Fields<'_>) -> Result<Biases, ConfigFault>,
    /// The window of a layer that slides, and which layers do when `layer_types` does not say, of so many.
    pub(in crate::model) windows: fn(Fields<'_>, usize) -> Result<SlidingLayers, ConfigFault>,
    /// Which layers rotate queries and keys, of so many.
    pub(in crate::model) rotates: fn(Fields<'_>, usize) -> Result<Vec<bool>, ConfigFault>,
    /// The experts of each layer that has some in place of an MLP, of so many.
    pub(in crate::model) experts: fn(Fields<'_>, usize) -> Result<Vec<Option<ExpertsSpec>>, ConfigFault>,
}

impl Family {
    /// What a family has unless it says otherwise.
    pub(super) const USUAL: Self = Self {
        model_type: "",
        architecture: "",
        tied_by_default: false,
        default_rope_theta: 10_000.0,
        default_norm_eps: 1e-6,
        default_kv_heads: None,
        default_head_dim: None,
        has_qk_norm: false,
        dropouts: &[("attention_dropout", 0.0)],
        biases: |_| Ok(Biases::default()),
        windows: |_, num_layers| Ok(SlidingLayers::none(num_layers)),
        rotates: |_, num_layers| Ok(vec![true; num_layers]),
        experts: |_, num_layers| Ok(vec![None; num_layers]),
    };
}

/// Which linears of a layer have a bias.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::model) struct Biases {
    /// Those to queries, keys and values.
    pub(in crate::model) qkv: bool,
    /// That from the heads back to the residual stream.
    pub(in crate::model) output: bool,
    /// Those of the MLP.
    pub(in crate::model) mlp: bool,
}

/// The layers of a model that have a sliding window.
#[derive(Debug)]
pub(in crate::model) struct SlidingLayers {
    /// Keys that a query sees, its own among them; `None` where no layer may slide.
    pub(in crate::model) window: Option<usize>,
    /// By layer, unless `layer_types` says otherwise.
    pub(in crate::model) slides: Vec<bool>,
}

impl SlidingLayers {
    /// None of so many.
    pub(super) fn none(num_layers: usize) -> Self {
        Self { window: None, slides: vec![false; num_layers] }
    }
}
