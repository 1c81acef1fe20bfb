//! `OLMo` 2 (arXiv 2501.00656) and 3 (arXiv 2512.13961).

use super::family::{Biases, Family, RopeRules, SlidingLayers};
use super::rope;
use crate::model::spec::{LayerNorms, QkNorm, RopeScaling, RopeSpec};

/// Norms stand behind attention and MLP, and queries and keys are normalised over their full width.
pub(super) const OLMO2: Family = Family {
    model_type: "olmo2",
    architecture: "Olmo2ForCausalLM",
    class_sizes: [4096, 11_008, 32, 32, 50_304, 2048],
    default_pad: Some(1),
    default_norm_eps: 1e-5,
    qk_norm: |_| Ok(Some(QkNorm::FullWidth)),
    norms: LayerNorms::BEHIND,
    biases: |fields| Biases::of_attention(fields, false),
    ..Family::USUAL
};

/// `OLMo` 2 with three layers that slide below each one that does not; the rotary embedding is scaled in the latter alone.
pub(super) const OLMO3: Family = Family {
    model_type: "olmo3",
    architecture: "Olmo3ForCausalLM",
    has_layer_types: true,
    // Transformers 5.24 writes a table for each type of layers.
    rope: RopeRules { has_table_by_type: true, ..RopeRules::of_theta(500_000.0) },
    windows: |fields, num_layers| SlidingLayers::but_each(4, fields, num_layers, 4096),
    sliding_rope: |fields, full, head_dim| {
        let own = rope::sliding_table(fields, full.theta, head_dim)?;
        Ok(own.unwrap_or(RopeSpec { scaling: RopeScaling::Unscaled, ..full }))
    },
    ..OLMO2
};
