//! Qwen2 and Qwen2.5: bias on queries, keys and values; sliding windows only where `config.json` switches them on.

use super::{Family, Variant};
use crate::model::config::{ConfigFault, Fields};
use crate::model::linear::Projection;

pub(super) const FAMILY: Family = Family {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    tied_by_default: false,
    default_rope_theta: 10_000.0,
    resolve,
};

fn resolve(fields: Fields<'_>) -> Result<Variant, ConfigFault> {
    fields.only("use_sliding_window", false)?;
    // No key of config.json says so: it is part of the architecture.
    Ok(Variant { biased: vec![Projection::Query, Projection::Key, Projection::Value], ..Variant::default() })
}
