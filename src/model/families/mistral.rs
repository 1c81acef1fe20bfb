//! Mistral: every layer has the same sliding window, or none where `config.json` says null.

use super::family::{Family, SlidingLayers};
use super::windows;
use crate::model::fields::{ConfigFault, Fields};

pub(super) const FAMILY: Family = Family {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    default_kv_heads: Some(8),
    windows: every_layer,
    ..Family::USUAL
};

fn every_layer(fields: Fields<'_>, num_layers: usize) -> Result<SlidingLayers, ConfigFault> {
    let window = windows::width(fields, Some(4096))?;
    Ok(SlidingLayers { window, slides: vec![true; num_layers] })
}
