//! Qwen3: heads of queries and keys are normalised, and are 128 wide unless `config.json` says otherwise; windows as Qwen2 has them.

use super::family::{Biases, Family};
use super::windows;
use crate::model::spec::QkNorm;

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    class_sizes: [4096, 22_016, 32, 32, 151_936, 32_768],
    default_kv_heads: Some(32),
    default_head_dim: Some(128),
    qk_norm: |_| Ok(Some(QkNorm::PerHead)),
    biases: |fields| Biases::of_attention(fields, false),
    has_layer_types: true,
    windows: windows::upper_layers,
    ..Family::USUAL
};
