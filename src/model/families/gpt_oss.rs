//! gpt-oss (arXiv 2508.10925): attention sinks, layers 0, 2, 4, … slide, and experts in every layer, whose matrices lie side by side in files.

use super::family::{Biases, Family, RopeRules, SlidingLayers};
use super::layers::{ExpertKeys, experts};
use crate::model::fields::Fields;
use crate::model::spec::{Activation, ExpertNames, ExpertsSpec};
use crate::units::Fault;

const NAMES: ExpertNames = ExpertNames { block: "mlp", router: "router", linears: None };
const KEYS: ExpertKeys = ExpertKeys {
    num_experts: &["num_local_experts", "num_experts"],
    width: "intermediate_size",
    default_experts: 128,
    default_top_k: 4,
};

pub(super) const FAMILY: Family = Family {
    model_type: "gpt_oss",
    architecture: "GptOssForCausalLM",
    class_sizes: [2880, 2880, 36, 64, 201_088, 131_072],
    rope: RopeRules { needs_table: true, ..RopeRules::of_theta(150_000.0) },
    default_norm_eps: 1e-5,
    default_kv_heads: Some(8),
    default_head_dim: Some(64),
    has_sinks: true,
    has_layer_types: true,
    biases: |fields| Biases::of_attention(fields, true),
    windows: |fields, num_layers| SlidingLayers::but_each(2, fields, num_layers, 128),
    experts: every_layer,
    ..Family::USUAL
};

/// The softmax of the chosen scores alone is that of all scores, divided by the sum of the chosen.
fn every_layer(fields: Fields<'_>, num_layers: usize) -> Result<Vec<Option<ExpertsSpec>>, Fault> {
    fields.only("swiglu_limit", 7.0)?;
    fields.only("swiglu_alpha", 1.702)?;
    let spec = experts(fields, &KEYS, &NAMES)?;
    Ok(vec![Some(ExpertsSpec { activation: Activation::ClampedSilu, ..spec }); num_layers])
}
