//! GGUF, the container of llama.cpp's models. Layout: ggml, `docs/gguf.md`.

mod dtype;
mod file;
mod header;
mod value;

pub use dtype::GgufDtype;
pub use file::{GgufFile, GgufTensor};
