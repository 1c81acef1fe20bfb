//! Tensors that wait: on the host, plain or quantised, or in files.

mod error;
mod park;
mod quant;
mod tensor_io;
mod vectors;

pub use error::StoreError;
pub use park::Parked;
pub use tensor_io::{load_tensor, load_tensors, pt_metadata, raw_tensors, save_tensors};
pub use vectors::{Bits, Quantised};
