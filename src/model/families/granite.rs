//! Granite: a Llama with constant factors on embeddings, scores, branches and logits.

use super::family::{Family, Scales};
use super::llama;
use crate::model::fields::Fields;
use crate::units::Fault;

pub(super) const FAMILY: Family =
    Family { model_type: "granite", architecture: "GraniteForCausalLM", biases: llama::biases, scales, ..Family::USUAL };

/// The factor on scores is `attention_multiplier` itself, which replaces the root of a head's width.
fn scales(fields: Fields<'_>) -> Result<Scales, Fault> {
    Ok(Scales {
        embedding: fields.number_or("embedding_multiplier", 1.0)?,
        scores: Some(fields.number_or("attention_multiplier", 1.0)?),
        residual: fields.number_or("residual_multiplier", 1.0)?,
        logits_divisor: fields.number_or("logits_scaling", 1.0)?,
    })
}
