//! GGUF, the container of llama.cpp's models (ggml, `docs/gguf.md`), and what its keys stand for in Hugging Face's format.

mod config;
mod dtype;
mod file;
mod header;
mod tokenizer;
mod write;

pub use config::architecture_of;
pub(super) use config::config_of;
pub use dtype::GgufDtype;
pub use file::GgufFile;
pub(super) use tokenizer::{tokenizer_config, tokenizer_json};
pub use write::{GgufKeys, write_gguf};
