//! Norms of head vectors and their cosines with the mean of their directions, on the CPU. `ops` has the rules, in libtorch's operations.

use std::ffi::c_int;

use tch::Tensor;
use torch_sys::C_tensor;

use super::autograd::pointer;
use super::kernels::{first, made};

unsafe extern "C" {
    fn kvtune_norms(x: *mut C_tensor, result: *mut *mut C_tensor) -> c_int;
    fn kvtune_cosines(x: *mut C_tensor, position: *mut C_tensor, result: *mut *mut C_tensor) -> c_int;
}

/// The Euclidean norm of each vector, on the CPU.
///
/// # Shapes
/// `x (B, G, n, D)`, f32 or f64; out `(B, G, n)`.
pub fn norms_on_cpu(x_bgnd: &Tensor) -> Tensor {
    // SAFETY: it is a live tensor; one result is written.
    first(made(1, |result| unsafe { kvtune_norms(pointer(x_bgnd), result) }))
}

/// The cosine of each vector with the mean direction of those whose position is not negative, on the CPU.
///
/// # Shapes
/// `x (B, G, n, D)`, f32 or f64, `position (B, G, n)`, i64; out `(B, G, n)`.
pub fn cosines_on_cpu(x_bgnd: &Tensor, position_bgn: &Tensor) -> Tensor {
    // SAFETY: both are live tensors; one result is written.
    first(made(1, |result| unsafe { kvtune_cosines(pointer(x_bgnd), pointer(position_bgn), result) }))
}
