//! Gemma 2: norms on both sides of each branch, whose weights are added to 1; scaled embeddings; capped scores and logits; each second
//! layer slides, the lowest among them.

use super::family::{Biases, Family, Scales};
use super::windows;
use crate::model::fields::Fields;
use crate::model::spec::{Activation, LayerNorms};
use crate::units::Fault;

pub(super) const FAMILY: Family = Family {
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
    windows: |fields, num_layers| Ok(windows::but_each(2, num_layers, windows::width(fields, Some(4096))?)),
    ..Family::USUAL
};

/// Embeddings grow by the root of their width; scores shrink by that of a number of its own, not of a head's channels.
pub(super) fn scales(fields: Fields<'_>) -> Result<Scales, Fault> {
    // Queries that see later keys.
    fields.only("use_bidirectional_attention", false)?;
    let hidden = fields.count("hidden_size", super::MAX_HIDDEN)?;
    let scores = fields.number_or("query_pre_attn_scalar", 256.0)?.powf(-0.5);
    Ok(Scales { embedding: (hidden as f64).sqrt(), scores: Some(scores), ..Scales::NONE })
}

/// The other key is of older files, and says the same.
pub(super) fn activation(fields: Fields<'_>) -> Result<Activation, Fault> {
    for key in ["hidden_activation", "hidden_act"] {
        fields.only(key, "gelu_pytorch_tanh")?;
    }
    Ok(Activation::GeluTanh)
}

/// A null is no cap, where a missing key is the default.
pub(super) fn soft_cap(fields: Fields<'_>, key: &'static str, default: Option<f64>) -> Result<Option<f64>, Fault> {
    if fields.get(key).is_none() {
        return Ok(default.filter(|_| !fields.is_null(key)));
    }
    fields.number(key).map(Some)
}
