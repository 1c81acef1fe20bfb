//! The C++ shim over libtorch, and the only `unsafe` of the project.

#![allow(unsafe_code)]

mod autograd;
pub mod cuda;
mod mapped;

pub use autograd::{BackwardError, attach_backward, gradients_of, run_backward};
pub use mapped::{FileMap, libtorch_version, tensor_over};
