//! Llama 2 and 3: no bias unless `config.json` says so.

use super::family::{Biases, Family};
use crate::model::fields::Fields;
use crate::units::Fault;

pub(super) const FAMILY: Family = Family { model_type: "llama", architecture: "LlamaForCausalLM", biases, ..Family::USUAL };

/// `attention_bias` is one of all four projections, `mlp_bias` one of the MLP's three.
pub(super) fn biases(fields: Fields<'_>) -> Result<Biases, Fault> {
    let attention = fields.flag_or("attention_bias", false)?;
    Ok(Biases { qkv: attention, output: attention, mlp: fields.flag_or("mlp_bias", false)? })
}
