//! What a model family says of itself.

use crate::model::fields::Fields;
use crate::model::spec::{Activation, ExpertsSpec, LayerNorms, QkNorm, QueryGrowth, RopeSpec};
use crate::ops::frequencies::MAX_SEQUENCE_LENGTH;
use crate::units::Fault;

/// Sizes that a configuration within another one leaves out where they are those of its class ([`Family::class_sizes`]).
pub(super) const SIZES: [&str; 6] =
    ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"];

/// Reads what stands in each of so many layers.
type ByLayer<T> = fn(Fields<'_>, usize) -> Result<Vec<T>, Fault>;

/// A family by the `model_type` of its `config.json`: how it differs from [`Self::USUAL`]. A default holds where `config.json` doesn't say.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact by itself")]
pub(in crate::model) struct Family {
    pub(in crate::model) model_type: &'static str,
    /// What `config.json` goes by in the family's `architectures`.
    pub(in crate::model) architecture: &'static str,
    /// The values of [`SIZES`], in that order, that Transformers' class has by itself.
    pub(in crate::model) class_sizes: [usize; 6],
    pub(in crate::model) default_pad: Option<u32>,
    /// Whether the output projection is the embedding when `config.json` doesn't say.
    pub(in crate::model) tied_by_default: bool,
    pub(in crate::model) rope: RopeRules,
    pub(in crate::model) default_norm_eps: f64,
    /// Heads of keys and values when `config.json` doesn't say; as many as there are query heads where `None`.
    pub(in crate::model) default_kv_heads: Option<usize>,
    /// Channels of a head when `config.json` doesn't say; an equal share of the residual stream's where `None`.
    pub(in crate::model) default_head_dim: Option<usize>,
    pub(in crate::model) qk_norm: fn(Fields<'_>) -> Result<Option<QkNorm>, Fault>,
    pub(in crate::model) has_sinks: bool,
    /// Where the norms of a layer stand.
    pub(in crate::model) norms: LayerNorms,
    /// Queries, keys and values come of one linear, and gate and up of another.
    pub(in crate::model) is_fused: bool,
    /// Norms multiply by 1 + their weight.
    pub(in crate::model) norms_add_one: bool,
    pub(in crate::model) logit_soft_cap: fn(Fields<'_>) -> Result<Option<f64>, Fault>,
    /// What no product of a query and a key exceeds, after its factor.
    pub(in crate::model) score_soft_cap: fn(Fields<'_>) -> Result<Option<f64>, Fault>,
    pub(in crate::model) activation: fn(Fields<'_>) -> Result<Activation, Fault>,
    /// Probabilities of dropout that the family knows: their keys, and what they are when `config.json` doesn't say.
    pub(in crate::model) dropouts: &'static [(&'static str, f64)],
    pub(in crate::model) biases: fn(Fields<'_>) -> Result<Biases, Fault>,
    /// The window of a layer that slides, and which layers do when `layer_types` does not say, of so many.
    pub(in crate::model) windows: fn(Fields<'_>, usize) -> Result<SlidingLayers, Fault>,
    /// Which layers rotate queries and keys, of so many.
    pub(in crate::model) rotates: ByLayer<bool>,
    /// The rotation of a layer that slides, where that of one that does not is given, and the channels of a head.
    pub(in crate::model) sliding_rope: fn(Fields<'_>, RopeSpec, usize) -> Result<RopeSpec, Fault>,
    pub(in crate::model) scales: fn(Fields<'_>) -> Result<Scales, Fault>,
    pub(in crate::model) query_growth: fn(Fields<'_>) -> Result<Option<QueryGrowth>, Fault>,
    /// The experts of each layer that has some in place of an MLP, of so many.
    pub(in crate::model) experts: ByLayer<Option<ExpertsSpec>>,
    /// Layers behind the last one in checkpoints, which predict further tokens and are left alone.
    pub(in crate::model) further_layers: fn(Fields<'_>) -> Result<usize, Fault>,
    pub(in crate::model) has_layer_types: bool,
}

impl Family {
    /// What a family has unless it says otherwise.
    pub(super) const USUAL: Self = Self {
        model_type: "",
        architecture: "",
        class_sizes: [4096, 11_008, 32, 32, 32_000, 2048],
        default_pad: None,
        tied_by_default: false,
        rope: RopeRules::USUAL,
        default_norm_eps: 1e-6,
        default_kv_heads: None,
        default_head_dim: None,
        qk_norm: |_| Ok(None),
        has_sinks: false,
        norms: LayerNorms::BEFORE,
        is_fused: false,
        norms_add_one: false,
        logit_soft_cap: |_| Ok(None),
        score_soft_cap: |_| Ok(None),
        activation,
        dropouts: &[("attention_dropout", 0.0)],
        biases: |_| Ok(Biases::default()),
        windows: |_, num_layers| Ok(SlidingLayers::none(num_layers)),
        rotates: |_, num_layers| Ok(vec![true; num_layers]),
        sliding_rope: |_, rope, _| Ok(rope),
        scales: |_| Ok(Scales::NONE),
        query_growth: |_| Ok(None),
        experts: |_, num_layers| Ok(vec![None; num_layers]),
        further_layers: |_| Ok(0),
        has_layer_types: false,
    };
}

/// `swish` is another name of `silu`.
fn activation(fields: Fields<'_>) -> Result<Activation, Fault> {
    const KEY: &str = "hidden_act";
    let is_swish = fields.get(KEY).is_some_and(|name| name == "swish");
    if is_swish { Ok(Activation::Silu) } else { fields.only(KEY, "silu").map(|()| Activation::Silu) }
}

/// How a family reads its rotary embedding.
#[derive(Debug)]
pub(in crate::model) struct RopeRules {
    /// The base of the frequencies when `config.json` doesn't say.
    pub(in crate::model) default_theta: f64,
    /// Keys of its table that all programs leave to the family itself, beside those of the table's kind.
    pub(in crate::model) further_keys: &'static [&'static str],
    /// Names of kinds that mean another one here, and which.
    pub(in crate::model) aliases: &'static [(&'static str, &'static str)],
    /// The original length when `config.json` does not say it beside the table. Families that have one do not look for it in the table.
    pub(in crate::model) default_original: Option<usize>,
    /// Layers that slide and those that do not may have a table each.
    pub(in crate::model) has_table_by_type: bool,
    /// The share of a head's channels that is rotated when `config.json` doesn't say.
    pub(in crate::model) default_share: f64,
    /// A table must be there: without one, other programs take the scaling of one certain model.
    pub(in crate::model) needs_table: bool,
}

impl RopeRules {
    /// What a family has unless it says otherwise.
    pub(super) const USUAL: Self = Self {
        default_theta: 10_000.0,
        further_keys: &[],
        aliases: &[],
        default_original: None,
        has_table_by_type: false,
        default_share: 1.0,
        needs_table: false,
    };

    pub(super) const fn of_theta(default_theta: f64) -> Self {
        Self { default_theta, ..Self::USUAL }
    }
}

/// Constant factors in a model.
#[derive(Clone, Copy, Debug)]
pub(in crate::model) struct Scales {
    /// On the embeddings of tokens.
    pub(in crate::model) embedding: f64,
    /// On the products of queries and keys; one over the root of a head's channels where `None`.
    pub(in crate::model) scores: Option<f64>,
    /// On what attention and feed-forward add to the residual stream.
    pub(in crate::model) residual: f64,
    pub(in crate::model) logits_divisor: f64,
}

impl Scales {
    pub(super) const NONE: Self = Self { embedding: 1.0, scores: None, residual: 1.0, logits_divisor: 1.0 };
}

/// Which linears of a layer have a bias.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::model) struct Biases {
    pub(in crate::model) qkv: bool,
    /// The linear from the heads back to the residual stream.
    pub(in crate::model) output: bool,
    pub(in crate::model) mlp: bool,
}

impl Biases {
    /// `attention_bias` gives all four projections a bias; where it is not written, `default` says whether. The MLP has none.
    pub(super) fn of_attention(fields: Fields<'_>, default: bool) -> Result<Self, Fault> {
        let attention = fields.flag_or("attention_bias", default)?;
        Ok(Self { qkv: attention, output: attention, mlp: false })
    }
}

#[derive(Debug)]
pub(in crate::model) struct SlidingLayers {
    /// Keys that a query sees, its own among them; `None` where no layer may slide.
    pub(in crate::model) window: Option<usize>,
    /// Which layers slide, unless `layer_types` says otherwise.
    pub(in crate::model) slides: Vec<bool>,
}

impl SlidingLayers {
    pub(super) fn none(num_layers: usize) -> Self {
        Self { window: None, slides: vec![false; num_layers] }
    }

    /// Every layer has the same window, or none.
    pub(super) fn every_layer(fields: Fields<'_>, num_layers: usize, default: Option<usize>) -> Result<Self, Fault> {
        Ok(Self { window: Self::window(fields, default)?, slides: vec![true; num_layers] })
    }

    /// All but each `pattern`-th layer slide.
    pub(super) fn but_each(pattern: usize, fields: Fields<'_>, num_layers: usize, default: usize) -> Result<Self, Fault> {
        let slides = (1..=num_layers).map(|layer| !layer.is_multiple_of(pattern)).collect();
        Ok(Self { window: Self::window(fields, Some(default))?, slides })
    }

    /// The upper layers slide, from `max_window_layers` on; both numbers mean nothing unless `use_sliding_window` is set.
    pub(super) fn upper_layers(fields: Fields<'_>, num_layers: usize) -> Result<Self, Fault> {
        if !fields.flag_or("use_sliding_window", false)? {
            return Ok(Self::none(num_layers));
        }
        let Some(window) = Self::window(fields, Some(4096))? else { return Ok(Self::none(num_layers)) };
        let first = fields.count_from_zero_or("max_window_layers", 28)?;
        Ok(Self { window: Some(window), slides: (0..num_layers).map(|layer| layer >= first).collect() })
    }

    /// `sliding_window`: a null is no window, where a missing key is the default.
    pub(super) fn window(fields: Fields<'_>, default: Option<usize>) -> Result<Option<usize>, Fault> {
        const KEY: &str = "sliding_window";
        if fields.get(KEY).is_none() {
            return Ok(default.filter(|_| !fields.is_null(KEY)));
        }
        fields.count(KEY, MAX_SEQUENCE_LENGTH).map(Some)
    }
}
