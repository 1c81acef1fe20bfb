//! Models in llama.cpp's container: what of a GGUF file stands for `config.json`, and which of its tensors for which of a checkpoint's.

mod config;
mod tensors;

pub(super) use config::config_of;
pub(super) use tensors::GgufWeights;
