//! The GPU that a test runs on, where there is one.
#![allow(unreachable_pub, reason = "public for the tests beside it")]

use std::sync::OnceLock;

use kvtune::native::cuda::{CudaSupport, load_cuda};
use tch::{Cuda, Device};

/// Looks for a GPU, once: before any other call into libtorch, which would remember that there is no CUDA.
pub fn look() -> &'static Result<Device, String> {
    static FOUND: OnceLock<Result<Device, String>> = OnceLock::new();
    FOUND.get_or_init(|| match load_cuda() {
        CudaSupport::Loaded if Cuda::is_available() => Ok(Device::Cuda(0)),
        CudaSupport::Loaded => Err("libtorch finds no CUDA device".to_owned()),
        CudaSupport::NoDevice => Err("this machine has no NVIDIA device".to_owned()),
        CudaSupport::Unavailable(reason) => Err(reason),
    })
}

/// The GPU, or one line that says why a test is left out.
#[allow(clippy::print_stderr, reason = "a test that is left out says why")]
pub fn gpu() -> Option<Device> {
    match look() {
        Ok(device) => Some(*device),
        Err(reason) => {
            eprintln!("skipped: no CUDA device ({reason})");
            None
        }
    }
}
