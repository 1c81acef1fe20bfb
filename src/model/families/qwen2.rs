//! Qwen2 and Qwen2.5: bias on queries, keys and values; sliding windows only where `config.json` switches them on.

use super::family::{Biases, Family};
use super::windows;

pub(super) const FAMILY: Family = Family {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    class_sizes: [4096, 22_016, 32, 32, 151_936, 32_768],
    // No key of config.json says so: it is part of the architecture.
    biases: |_| Ok(Biases { qkv: true, ..Biases::default() }),
    has_layer_types: true,
    windows: windows::upper_layers,
    ..Family::USUAL
};
