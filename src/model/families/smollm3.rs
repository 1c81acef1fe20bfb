//! `SmolLM3`: some layers know no position.

use serde_json::Value;

use super::family::{Family, RopeRules, SlidingLayers};
use super::{llama, windows};
use crate::model::fields::Fields;
use crate::units::Fault;

pub(super) const FAMILY: Family = Family {
    model_type: "smollm3",
    architecture: "SmolLM3ForCausalLM",
    class_sizes: [2048, 11_008, 36, 16, 128_256, 32_768],
    default_pad: Some(128_004),
    tied_by_default: true,
    rope: RopeRules::of_theta(2_000_000.0),
    default_kv_heads: Some(4),
    biases: llama::biases,
    has_layer_types: true,
    windows,
    rotates,
    ..Family::USUAL
};

/// In `no_rope_layers` a 1 is a layer with a rotation, whatever its name says; without the list each fourth layer has none.
fn rotates(fields: Fields<'_>, num_layers: usize) -> Result<Vec<bool>, Fault> {
    const KEY: &str = "no_rope_layers";
    let Some(value) = fields.get(KEY) else {
        let interval = fields.count_or("no_rope_layer_interval", 4, usize::MAX)?;
        return Ok((0..num_layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect());
    };
    let flag = |value: &Value| value.as_u64().filter(|flag| *flag <= 1).map(|flag| flag == 1);
    let flags: Option<Vec<bool>> = value.as_array().and_then(|list| list.iter().map(flag).collect());
    let expected =
        || fields.range(KEY, format!("a list of {num_layers} numbers, 1 for a layer with a rotation and 0 for one without"));
    flags.filter(|flags| flags.len() == num_layers).ok_or_else(expected)
}

/// Layers without a rotation slide where `use_sliding_window` is set.
fn windows(fields: Fields<'_>, num_layers: usize) -> Result<SlidingLayers, Fault> {
    if !fields.flag_or("use_sliding_window", false)? {
        return Ok(SlidingLayers::none(num_layers));
    }
    let slides = rotates(fields, num_layers)?.into_iter().map(|rotates| !rotates).collect();
    Ok(SlidingLayers { window: windows::width(fields, None)?, slides })
}
