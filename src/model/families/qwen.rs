//! Qwen2 and Qwen3.

use serde_json::Value;

use super::family::{Biases, Family, SlidingLayers};
use super::layers::{ExpertKeys, experts};
use crate::model::fields::Fields;
use crate::model::spec::{ExpertNames, ExpertsSpec, QkNorm};
use crate::units::Fault;

/// Qwen2 and Qwen2.5: biases on queries, keys and values; sliding windows only where `config.json` switches them on.
pub(super) const QWEN2: Family = Family {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    class_sizes: [4096, 22_016, 32, 32, 151_936, 32_768],
    // No key of config.json says so: it is part of the architecture.
    biases: |_| Ok(Biases { qkv: true, ..Biases::default() }),
    has_layer_types: true,
    windows: SlidingLayers::upper_layers,
    ..Family::USUAL
};

/// Qwen2 with heads whose queries and keys are normalised, and are 128 wide unless `config.json` says otherwise.
pub(super) const QWEN3: Family = Family {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    default_kv_heads: Some(32),
    default_head_dim: Some(128),
    qk_norm: |_| Ok(Some(QkNorm::PerHead)),
    biases: |fields| Biases::of_attention(fields, false),
    ..QWEN2
};

pub(super) const NAMES: ExpertNames =
    ExpertNames { block: "mlp", router: "gate", linears: Some(["gate_proj", "up_proj", "down_proj"]) };
/// Published files say `num_experts`, and Transformers 5 writes the other.
pub(super) const KEYS: ExpertKeys = ExpertKeys {
    num_experts: &["num_experts", "num_local_experts"],
    width: "moe_intermediate_size",
    default_experts: 128,
    default_top_k: 8,
};

/// Qwen3 with experts in most layers, of a width of their own.
pub(super) const QWEN3_MOE: Family = Family {
    model_type: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    class_sizes: [2048, 6144, 24, 32, 151_936, 32_768],
    default_kv_heads: Some(4),
    qk_norm: |_| Ok(Some(QkNorm::PerHead)),
    biases: |fields| Biases::of_attention(fields, false),
    windows: all_or_none,
    experts: some_layers,
    ..Family::USUAL
};

/// All layers slide, or none: this family knows no `max_window_layers`.
fn all_or_none(fields: Fields<'_>, num_layers: usize) -> Result<SlidingLayers, Fault> {
    if fields.flag_or("use_sliding_window", false)? {
        return SlidingLayers::every_layer(fields, num_layers, Some(4096));
    }
    Ok(SlidingLayers::none(num_layers))
}

/// Each `decoder_sparse_step`-th layer has experts, but for those of `mlp_only_layers`.
fn some_layers(fields: Fields<'_>, num_layers: usize) -> Result<Vec<Option<ExpertsSpec>>, Fault> {
    const DENSE: &str = "mlp_only_layers";
    let spec = experts(fields, &KEYS, &NAMES)?;
    let spec = ExpertsSpec { is_renormalised: fields.flag_or("norm_topk_prob", false)?, ..spec };
    let step = fields.count_or("decoder_sparse_step", 1, usize::MAX)?;
    let index = |layer: &Value| layer.as_u64().map(|layer| layer as usize);
    let dense: Option<Vec<usize>> =
        fields.get(DENSE).map_or(Some(Vec::new()), |list| list.as_array()?.iter().map(index).collect());
    let dense = dense.ok_or_else(|| fields.range(DENSE, "a list of layers".into()))?;
    let has_experts = |layer: &usize| !dense.contains(layer) && (layer + 1).is_multiple_of(step);
    Ok((0..num_layers).map(|layer| has_experts(&layer).then(|| spec.clone())).collect())
}
