//! Llama 2 and 3: no bias unless `config.json` says so.

use super::family::{Biases, Family};
use crate::model::fields::Fields;
use crate::units::Fault;

pub(super) const FAMILY: Family = Family { model_type: "llama", architecture: "LlamaForCausalLM", biases, ..Family::USUAL };

/// `mlp_bias` gives the MLP's three projections a bias.
pub(super) fn biases(fields: Fields<'_>) -> Result<Biases, Fault> {
    let of_attention = Biases::of_attention(fields, false)?;
    Ok(Biases { mlp: fields.flag_or("mlp_bias", false)?, ..of_attention })
}
