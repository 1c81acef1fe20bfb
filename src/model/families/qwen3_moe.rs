//! Qwen3-MoE: Qwen3 with experts in most layers, of a width of their own.

use serde_json::Value;

use super::experts::{ExpertKeys, experts};
use super::family::{Biases, Family, SlidingLayers};
use super::windows;
use crate::model::fields::Fields;
use crate::model::spec::{ExpertNames, ExpertsSpec, QkNorm};
use crate::units::Fault;

pub(super) const NAMES: ExpertNames =
    ExpertNames { block: "mlp", router: "gate", linears: Some(["gate_proj", "up_proj", "down_proj"]) };
/// Published files say `num_experts`, and Transformers 5 writes the other.
const KEYS: ExpertKeys = ExpertKeys {
    num_experts: &["num_experts", "num_local_experts"],
    width: "moe_intermediate_size",
    default_experts: 128,
    default_top_k: 8,
};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    class_sizes: [2048, 6144, 24, 32, 151_936, 32_768],
    default_kv_heads: Some(4),
    qk_norm: |_| Ok(Some(QkNorm::PerHead)),
    biases: |fields| Biases::of_attention(fields, false),
    windows,
    experts: some_layers,
    ..Family::USUAL
};

/// All layers slide, or none: this family knows no `max_window_layers`.
fn windows(fields: Fields<'_>, num_layers: usize) -> Result<SlidingLayers, Fault> {
    if fields.flag_or("use_sliding_window", false)? {
        return windows::every_layer(fields, num_layers, Some(4096));
    }
    Ok(SlidingLayers::none(num_layers))
}

/// Each `decoder_sparse_step`-th layer has experts, but for those of `mlp_only_layers`.
fn some_layers(fields: Fields<'_>, num_layers: usize) -> Result<Vec<Option<ExpertsSpec>>, Fault> {
    const DENSE: &str = "mlp_only_layers";
    let spec = experts(fields, &KEYS, &NAMES)?;
    let spec = ExpertsSpec { is_renormalised: fields.flag_or("norm_topk_prob", false)?, ..spec };
    let step = fields.count_or("decoder_sparse_step", 1, usize::MAX)?;
    let dense: Option<Vec<usize>> = match fields.get(DENSE) {
        None => Some(Vec::new()),
        Some(value) => {
            value.as_array().and_then(|list| list.iter().map(|layer| Value::as_u64(layer).map(|l| l as usize)).collect())
        }
    };
    let dense = dense.ok_or_else(|| fields.range(DENSE, "a list of layers".into()))?;
    let has_experts = |layer: &usize| !dense.contains(layer) && (layer + 1).is_multiple_of(step);
    Ok((0..num_layers).map(|layer| has_experts(&layer).then(|| spec.clone())).collect())
}
