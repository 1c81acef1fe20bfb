//! `OLMo` 2 (arXiv 2501.00656): norms stand behind attention and MLP, and queries and keys are normalised over their full width.

use super::family::{Biases, Family};
use crate::model::spec::{LayerNorms, QkNorm};

pub(super) const FAMILY: Family = Family {
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
