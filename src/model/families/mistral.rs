//! Mistral, Mixtral and Ministral 3.

use super::family::{Family, RopeRules, SlidingLayers};
use super::layers::{ExpertKeys, experts};
use super::rope;
use crate::model::fields::Fields;
use crate::model::spec::{ExpertNames, QueryGrowth};
use crate::ops::frequencies::MAX_SEQUENCE_LENGTH;
use crate::units::Fault;

/// Every layer has the same sliding window, or none where `config.json` says null.
pub(super) const MISTRAL: Family = Family {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    class_sizes: [4096, 14_336, 32, 32, 32_000, 131_072],
    default_kv_heads: Some(8),
    windows: |fields, num_layers| SlidingLayers::every_layer(fields, num_layers, Some(4096)),
    ..Family::USUAL
};

const NAMES: ExpertNames = ExpertNames { block: "block_sparse_moe", router: "gate", linears: Some(["w1", "w3", "w2"]) };
const KEYS: ExpertKeys = ExpertKeys {
    num_experts: &["num_local_experts", "num_experts"],
    width: "intermediate_size",
    default_experts: 8,
    default_top_k: 2,
};

/// Mistral with experts in every layer, whose weights are always divided by their sum.
pub(super) const MIXTRAL: Family = Family {
    model_type: "mixtral",
    architecture: "MixtralForCausalLM",
    rope: RopeRules::of_theta(1_000_000.0),
    default_norm_eps: 1e-5,
    windows: |fields, num_layers| SlidingLayers::every_layer(fields, num_layers, None),
    experts: |fields, num_layers| Ok(vec![Some(experts(fields, &KEYS, &NAMES)?); num_layers]),
    ..MISTRAL
};

const BETA: &str = "llama_4_scaling_beta";
/// Transformers 5.24 writes this into the table, too, and reads it nowhere.
const POSITIONS: &str = "max_position_embeddings";

/// Mistral whose queries grow with their position.
pub(super) const MINISTRAL3: Family = Family {
    model_type: "ministral3",
    architecture: "Ministral3ForCausalLM",
    class_sizes: [4096, 14_336, 34, 32, 131_072, 262_144],
    default_pad: Some(11),
    default_norm_eps: 1e-5,
    default_head_dim: Some(128),
    rope: RopeRules { default_theta: 1_000_000.0, further_keys: &[BETA, POSITIONS], needs_table: true, ..RopeRules::USUAL },
    windows: |fields, num_layers| SlidingLayers::every_layer(fields, num_layers, None),
    query_growth,
    ..MISTRAL
};

/// The numbers stand with those of the rotary embedding.
fn query_growth(fields: Fields<'_>) -> Result<Option<QueryGrowth>, Fault> {
    let Some(table) = rope::table(fields)? else { return Ok(None) };
    let Some(beta) = table.number_but_zero(BETA)? else { return Ok(None) };
    let original = table.count(rope::ORIGINAL, MAX_SEQUENCE_LENGTH)?;
    Ok(Some(QueryGrowth { beta, original }))
}
