//! `OLMo` 3 (arXiv 2512.13961): `OLMo` 2 with three layers that slide below each one that does not; the rotary embedding is scaled in the
//! latter alone.

use super::family::{Family, RopeRules, SlidingLayers};
use super::{olmo2, rope, windows};
use crate::model::spec::{RopeScaling, RopeSpec};

pub(super) const FAMILY: Family = Family {
    model_type: "olmo3",
    architecture: "Olmo3ForCausalLM",
    has_layer_types: true,
    // Transformers 5.24 writes a table for each type of layers.
    rope: RopeRules { has_table_by_type: true, ..RopeRules::of_theta(500_000.0) },
    windows: |fields, num_layers| {
        let slides = (0..num_layers).map(|layer| !(layer + 1).is_multiple_of(4)).collect();
        Ok(SlidingLayers { window: windows::width(fields, Some(4096))?, slides })
    },
    sliding_rope: |fields, full, head_dim| {
        let own = rope::sliding_table(fields, full.theta, head_dim)?;
        Ok(own.unwrap_or(RopeSpec { scaling: RopeScaling::Unscaled, ..full }))
    },
    ..olmo2::FAMILY
};
