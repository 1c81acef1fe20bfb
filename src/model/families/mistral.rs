//! Mistral: every layer has the same sliding window, or none where `config.json` says null.

use super::family::Family;
use super::windows;

pub(super) const FAMILY: Family = Family {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    class_sizes: [4096, 14_336, 32, 32, 32_000, 131_072],
    default_kv_heads: Some(8),
    windows: |fields, num_layers| windows::every_layer(fields, num_layers, Some(4096)),
    ..Family::USUAL
};
