//! Vectors in few bits and back, on the CPU in one pass each. `store` has the rule, in libtorch's operations.

use std::ffi::c_int;

use tch::{Kind, Tensor};

use super::autograd::{Raw, pointer};
use super::kernels::{computes, made, made_one};

unsafe extern "C" {
    fn kvtune_quantise(x: Raw, bits: i64, results: *mut Raw) -> c_int;
    fn kvtune_restore(level: Raw, range: Raw, like: Raw, bits: i64, width: i64, result: *mut Raw) -> c_int;
}

/// Quantises each vector along the last axis in 4, 5, 8 or 9 bits; `None` where the kernel does not serve, and libtorch's operations must.
///
/// # Shapes
/// `x (…, D)`, f32, f64 or bf16; levels `(…, bytes)`, u8, and range `(…, 2)`, i16.
pub fn quantise_on_cpu(x: &Tensor, bits: usize) -> Option<[Tensor; 2]> {
    let is_served = computes(x.device(), x.kind()) && x.size().last().is_some_and(|&width| width > 0);
    // SAFETY: it is a live tensor; two results are written.
    is_served.then(|| made(|results| unsafe { kvtune_quantise(pointer(x), bits as i64, results) }))
}

/// The vectors that quantised ones stand for; `None` where the kernel does not serve.
///
/// # Shapes
/// As in [`quantise_on_cpu`], levels and range being views of their kind; `(…, D)` out, in `kind`.
pub fn restore_on_cpu(level: &Tensor, range: &Tensor, bits: usize, width: i64, kind: Kind) -> Option<Tensor> {
    if !computes(level.device(), kind) || width == 0 {
        return None;
    }
    let like = Tensor::empty([0], (kind, level.device()));
    let [level, range, like] = [level, range, &like].map(pointer);
    // SAFETY: all are live tensors; one result is written.
    Some(made_one(|result| unsafe { kvtune_restore(level, range, like, bits as i64, width, result) }))
}
