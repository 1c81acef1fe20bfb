//! Frozen weights in few bits: those of GGUF files, those that checkpoints in safetensors have (bitsandbytes, MXFP4, FP8, GPTQ, AWQ and
//! compressed-tensors), and plain ones that are packed in memory.

mod config;
mod files;
mod forms;
mod gguf;
mod gguf_written;
mod load;
mod quantise;

pub(super) use config::{QUANTISATION, Quantisation, QuantisedModules};
pub(super) use gguf::GgufWeights;
pub(super) use quantise::{is_quantised, quantised, quantised_sizes};
