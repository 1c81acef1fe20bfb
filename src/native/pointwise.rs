//! What the shim computes number by number, on the CPU: norms, gates and rotations, each in one pass, without autograd.

use std::ffi::c_int;

use tch::Tensor;

use super::autograd::{Raw, or_panic, pointer, tensors};
use super::kernels::{made, made_one};

unsafe extern "C" {
    fn kvtune_rms_norm(x: Raw, weight: Raw, eps: f64, results: *mut Raw) -> c_int;
    fn kvtune_rms_norm_backward(dout: Raw, x: Raw, weight: Raw, rstd: Raw, needs: &[bool; 2], results: *mut Raw) -> c_int;
    fn kvtune_swiglu(gate: Raw, up: Raw, result: *mut Raw) -> c_int;
    fn kvtune_swiglu_backward(dout: Raw, gate: Raw, up: Raw, results: *mut Raw) -> c_int;
    fn kvtune_rotate(x: Raw, cos: Raw, sin: Raw, back: c_int, result: *mut Raw) -> c_int;
}

/// `weight · x / sqrt(mean(x²) + eps)` over the last dimension, and one over the root of each row.
///
/// # Shapes
/// `x (…, E)`, `weight_e (E)`, of one kind; results `(…, E)`, and `(…, 1)` in f32 (f64 for f64).
pub fn rms_norm(x: &Tensor, weight_e: &Tensor, eps: f64) -> (Tensor, Tensor) {
    let [x, weight] = [x, weight_e].map(pointer);
    // SAFETY: both are live tensors; two results are written.
    made(|results| unsafe { kvtune_rms_norm(x, weight, eps, results) }).into()
}

/// The backward of [`rms_norm`], given its roots: gradients of x and of the weight, as far as they are needed.
///
/// # Shapes
/// `dy` and `x (…, E)`, `rstd (…, 1)`; results as x and the weight.
pub fn rms_norm_backward(dy: &Tensor, [x, weight_e, rstd]: [&Tensor; 3], needs: [bool; 2]) -> [Option<Tensor>; 2] {
    let [dy, x, weight, rstd] = [dy, x, weight_e, rstd].map(pointer);
    // SAFETY: all are live tensors; at most two results are written.
    or_panic(tensors(|results| unsafe { kvtune_rms_norm_backward(dy, x, weight, rstd, &needs, results) }))
}

/// `silu(gate) · up`.
///
/// # Shapes
/// Two tensors of one shape and kind in, the same out.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Tensor {
    let [gate, up] = [gate, up].map(pointer);
    // SAFETY: both are live tensors; one result is written.
    made_one(|result| unsafe { kvtune_swiglu(gate, up, result) })
}

/// The backward of [`swiglu`]: gradients of gate and up.
///
/// # Shapes
/// All of one shape and kind.
pub fn swiglu_backward(dy: &Tensor, gate: &Tensor, up: &Tensor) -> (Tensor, Tensor) {
    let [dy, gate, up] = [dy, gate, up].map(pointer);
    // SAFETY: all are live tensors; two results are written.
    made(|results| unsafe { kvtune_swiglu_backward(dy, gate, up, results) }).into()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotationDirection {
    /// Turns by the angles; the result lies in memory as attention reads it, `(B, heads, n, D)`.
    Forth,
    /// Turns by the negative angles; the result lies in memory as projections do, `(B, n, heads, D)`.
    Back,
}

/// Turns channels i and `D/2 + i` of each head of each token.
///
/// # Shapes
/// `x_bhnd (B, heads, n, D)`, `cos` and `sin (B, 1, n, D/2)` or `(1, 1, n, D/2)`, of one kind; result `(B, heads, n, D)`.
pub fn rotate(x_bhnd: &Tensor, cos: &Tensor, sin: &Tensor, turn: RotationDirection) -> Tensor {
    let [x, cos, sin] = [x_bhnd, cos, sin].map(pointer);
    // SAFETY: all are live tensors; one result is written.
    made_one(|result| unsafe { kvtune_rotate(x, cos, sin, c_int::from(turn == RotationDirection::Back), result) })
}
