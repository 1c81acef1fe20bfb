//! Phi-3 and Phi-4: one linear for queries, keys and values, and one for gate and up.

use super::family::{Family, RopeRules, SlidingLayers};

pub(super) const FAMILY: Family = Family {
    model_type: "phi3",
    architecture: "Phi3ForCausalLM",
    class_sizes: [3072, 8192, 32, 32, 32_064, 4096],
    default_pad: Some(32_000),
    default_norm_eps: 1e-5,
    is_fused: true,
    // Files of the first models use these names for what was later called `longrope`.
    rope: RopeRules { aliases: &[("su", "longrope"), ("yarn", "longrope")], default_original: Some(4096), ..RopeRules::USUAL },
    dropouts: &[("attention_dropout", 0.0), ("resid_pdrop", 0.0), ("embd_pdrop", 0.0)],
    windows: |fields, num_layers| SlidingLayers::every_layer(fields, num_layers, None),
    ..Family::USUAL
};
