//! Ministral 3: Mistral whose queries grow with their position.

use super::family::{Family, RopeRules};
use super::{rope, windows};
use crate::model::fields::Fields;
use crate::model::spec::QueryGrowth;
use crate::units::Fault;

const BETA: &str = "llama_4_scaling_beta";
/// Transformers 5.24 writes this into the table, too, and reads it nowhere.
const POSITIONS: &str = "max_position_embeddings";

pub(super) const FAMILY: Family = Family {
    model_type: "ministral3",
    architecture: "Ministral3ForCausalLM",
    class_sizes: [4096, 14_336, 34, 32, 131_072, 262_144],
    default_pad: Some(11),
    default_norm_eps: 1e-5,
    default_kv_heads: Some(8),
    default_head_dim: Some(128),
    rope: RopeRules { default_theta: 1_000_000.0, further_keys: &[BETA, POSITIONS], needs_table: true, ..RopeRules::USUAL },
    windows: |fields, num_layers| windows::every_layer(fields, num_layers, None),
    query_growth,
    ..Family::USUAL
};

/// The numbers stand with those of the rotary embedding.
fn query_growth(fields: Fields<'_>) -> Result<Option<QueryGrowth>, Fault> {
    let Some(table) = rope::table(fields)? else { return Ok(None) };
    let Some(beta) = table.number_but_zero(BETA)? else { return Ok(None) };
    let original = table.count("original_max_position_embeddings", rope::MAX_POSITIONS)?;
    Ok(Some(QueryGrowth { beta, original }))
}
