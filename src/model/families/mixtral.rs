//! Mixtral: Mistral with experts in every layer, whose weights are always divided by their sum.

use super::experts::{ExpertKeys, experts};
use super::family::{Family, RopeRules};
use super::windows;
use crate::model::spec::ExpertNames;

const NAMES: ExpertNames = ExpertNames { block: "block_sparse_moe", router: "gate", linears: Some(["w1", "w3", "w2"]) };
const KEYS: ExpertKeys = ExpertKeys {
    num_experts: &["num_local_experts", "num_experts"],
    width: "intermediate_size",
    default_experts: 8,
    default_top_k: 2,
};

pub(super) const FAMILY: Family = Family {
    model_type: "mixtral",
    architecture: "MixtralForCausalLM",
    class_sizes: [4096, 14_336, 32, 32, 32_000, 131_072],
    rope: RopeRules::of_theta(1_000_000.0),
    default_norm_eps: 1e-5,
    default_kv_heads: Some(8),
    windows: |fields, num_layers| windows::every_layer(fields, num_layers, None),
    experts: |fields, num_layers| Ok(vec![Some(experts(fields, &KEYS, &NAMES)?); num_layers]),
    ..Family::USUAL
};
