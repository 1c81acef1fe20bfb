//! `OLMo` 2 (arXiv 2501.00656): norms stand behind attention and MLP, and queries and keys are normalised over their full width.

use super::family::{Biases, Family};
use crate::model::fields::Fields;
use crate::model::spec::{NormsSpec, QkNorm};
use crate::units::Fault;

pub(super) const FAMILY: Family = Family {
    model_type: "olmo2",
    architecture: "Olmo2ForCausalLM",
    default_norm_eps: 1e-5,
    qk_norm: |_| Ok(Some(QkNorm::FullWidth)),
    norms: NormsSpec::BEHIND,
    biases,
    ..Family::USUAL
};

/// `attention_bias` is one of all four projections; the MLP has none.
fn biases(fields: Fields<'_>) -> Result<Biases, Fault> {
    let attention = fields.flag_or("attention_bias", false)?;
    Ok(Biases { qkv: attention, output: attention, mlp: false })
}
