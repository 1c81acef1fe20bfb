//! Qwen2 and Qwen2.5: bias on queries, keys and values; sliding windows only where `config.json` switches them on.

use super::family::{Family, SlidingLayers};
use crate::model::fields::{ConfigFault, Fields};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    tied_by_default: false,
    default_rope_theta: 10_000.0,
    // No key of config.json says so: it is part of the architecture.
    has_qkv_bias: true,
    has_qk_norm: false,
    windows,
};

/// The widest window: no position is larger.
const MAX_WINDOW: usize = 1 << 31;

/// The upper layers slide, from `max_window_layers` on; both numbers mean nothing unless `use_sliding_window` is set.
fn windows(fields: Fields<'_>, num_layers: usize) -> Result<SlidingLayers, ConfigFault> {
    if !fields.flag_or("use_sliding_window", false)? {
        return Ok(SlidingLayers { window: None, slides: vec![false; num_layers] });
    }
    // A null is no window, where a missing key is the default.
    if fields.is_null("sliding_window") {
        return Ok(SlidingLayers { window: None, slides: vec![false; num_layers] });
    }
    let window = fields.count_or("sliding_window", 4096, MAX_WINDOW)?;
    let first = fields.count_from_zero_or("max_window_layers", 28)?;
    Ok(SlidingLayers { window: Some(window), slides: (0..num_layers).map(|layer| layer >= first).collect() })
}
