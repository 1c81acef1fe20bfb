//! `OLMo` 3 (arXiv 2512.13961): `OLMo` 2 with three layers that slide below each one that does not; the rotary embedding is scaled in the
//! latter alone.

use super::family::{Family, SlidingLayers};
use super::{olmo2, windows};
use crate::model::spec::{RopeScaling, RopeSpec};

pub(super) const FAMILY: Family = Family {
    model_type: "olmo3",
    architecture: "Olmo3ForCausalLM",
    has_layer_types: true,
    windows: |fields, num_layers| {
        let slides = (0..num_layers).map(|layer| !(layer + 1).is_multiple_of(4)).collect();
        Ok(SlidingLayers { window: windows::width(fields, Some(4096))?, slides })
    },
    sliding_rope: |_, rope, _| Ok(RopeSpec { scaling: RopeScaling::Unscaled, ..rope }),
    ..olmo2::FAMILY
};
