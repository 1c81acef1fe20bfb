//! Gemma 2 and 3.

use super::family::{Biases, Family, RopeRules, Scales, SlidingLayers};
use super::rope;
use crate::model::fields::Fields;
use crate::model::spec::{Activation, LayerNorms, QkNorm, RopeSpec};
use crate::units::Fault;

/// Norms on both sides of each branch, whose weights are added to 1; scaled embeddings; capped scores and logits; layers 0, 2, 4, … slide.
pub(super) const GEMMA2: Family = Family {
    model_type: "gemma2",
    architecture: "Gemma2ForCausalLM",
    class_sizes: [2304, 9216, 26, 8, 256_000, 8192],
    default_pad: Some(0),
    tied_by_default: true,
    default_kv_heads: Some(4),
    default_head_dim: Some(256),
    norms: LayerNorms::AROUND,
    norms_add_one: true,
    scales,
    logit_soft_cap: |fields| soft_cap(fields, "final_logit_softcapping", Some(30.0)),
    activation,
    score_soft_cap: |fields| soft_cap(fields, "attn_logit_softcapping", Some(50.0)),
    biases: |fields| Biases::of_attention(fields, false),
    has_layer_types: true,
    windows: |fields, num_layers| SlidingLayers::but_each(2, fields, num_layers, 4096),
    ..Family::USUAL
};

/// Embeddings grow by the root of their width; scores shrink by that of a number of its own, not of a head's channels.
fn scales(fields: Fields<'_>) -> Result<Scales, Fault> {
    // Queries that see later keys.
    fields.only("use_bidirectional_attention", false)?;
    let hidden = fields.count("hidden_size", super::MAX_HIDDEN)?;
    let scores = fields.number_or("query_pre_attn_scalar", 256.0)?.powf(-0.5);
    Ok(Scales { embedding: (hidden as f64).sqrt(), scores: Some(scores), ..Scales::NONE })
}

/// The other key is of older files, and says the same.
fn activation(fields: Fields<'_>) -> Result<Activation, Fault> {
    for key in ["hidden_activation", "hidden_act"] {
        fields.only(key, "gelu_pytorch_tanh")?;
    }
    Ok(Activation::GeluTanh)
}

/// A null is no cap, where a missing key is the default.
fn soft_cap(fields: Fields<'_>, key: &'static str, default: Option<f64>) -> Result<Option<f64>, Fault> {
    if fields.get(key).is_none() {
        return Ok(default.filter(|_| !fields.is_null(key)));
    }
    fields.number(key).map(Some)
}

/// The part that reads text: Gemma 2 with normalised queries and keys in place of caps, and two rotations: one of a large base, which may
/// be scaled, in each sixth layer, and one of a small base in those between, which slide.
pub(super) const GEMMA3: Family = Family {
    model_type: "gemma3_text",
    architecture: "Gemma3ForCausalLM",
    class_sizes: [2304, 9216, 26, 8, 262_208, 131_072],
    rope: RopeRules { has_table_by_type: true, ..RopeRules::of_theta(1_000_000.0) },
    qk_norm: |_| Ok(Some(QkNorm::PerHead)),
    logit_soft_cap: |fields| soft_cap(fields, "final_logit_softcapping", None),
    // Transformers reads the key, and does not cap scores by it.
    score_soft_cap: |_| Ok(None),
    sliding_rope,
    windows: by_pattern,
    ..GEMMA2
};

/// A base of its own, which is not scaled with that of the others.
fn sliding_rope(fields: Fields<'_>, _: RopeSpec, head_dim: usize) -> Result<RopeSpec, Fault> {
    const LOCAL: &str = "rope_local_base_freq";
    let local = fields.number_or(LOCAL, 10_000.0)?;
    let found = rope::sliding_table(fields, local, head_dim)?.unwrap_or_else(|| RopeSpec::plain(local, head_dim));
    if fields.get(LOCAL).is_some() && (found.theta - local).abs() > 0.0 {
        return Err(fields.range(LOCAL, format!("{} as in the table of layers that slide", found.theta)));
    }
    Ok(found)
}

/// `sliding_window_pattern` says which layer is the first that does not slide; Transformers 5 writes it with a line before it.
fn by_pattern(fields: Fields<'_>, num_layers: usize) -> Result<SlidingLayers, Fault> {
    const KEYS: [&str; 2] = ["sliding_window_pattern", "_sliding_window_pattern"];
    let [pattern, other] = [fields.count_or(KEYS[0], 6, usize::MAX)?, fields.count_or(KEYS[1], 6, usize::MAX)?];
    let pattern = if fields.get(KEYS[0]).is_some() { pattern } else { other };
    if fields.get(KEYS[1]).is_some() && other != pattern {
        return Err(fields.range(KEYS[1], format!("{pattern} as in `{}`", KEYS[0])));
    }
    SlidingLayers::but_each(pattern, fields, num_layers, 4096)
}
