//! Vectors in few bits and back, on the CPU in one pass each. `store` has the rule, in libtorch's operations.

use std::ffi::c_int;

use tch::{Kind, Tensor};
use torch_sys::C_tensor;

use super::autograd::pointer;
use super::kernels::{computes, made};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Levels {
    /// Bits of a level: 4, 5, 8 or 9.
    pub bits: usize,
    pub width: i64,
    pub bytes: i64,
}

unsafe extern "C" {
    fn kvtune_quantise(x: *mut C_tensor, bits: i64, width: i64, bytes: i64, results: *mut *mut C_tensor) -> c_int;
    fn kvtune_restore(
        level: *mut C_tensor,
        range: *mut C_tensor,
        like: *mut C_tensor,
        bits: i64,
        width: i64,
        bytes: i64,
        result: *mut *mut C_tensor,
    ) -> c_int;
}

/// Quantises each vector along the last axis; `None` where the kernel does not serve, and libtorch's operations must.
///
/// # Shapes
/// `x (…, D)`, f32, f64 or bf16; levels `(…, bytes)`, u8, and range `(…, 2)`, i16.
pub fn quantise_on_cpu(x: &Tensor, levels: Levels) -> Option<(Tensor, Tensor)> {
    let Levels { bits, width, bytes } = levels;
    let is_served = computes(x.device(), x.kind()) && width > 0;
    // SAFETY: it is a live tensor; two results are written.
    is_served.then(|| made(|results| unsafe { kvtune_quantise(pointer(x), bits as i64, width, bytes, results) }).into())
}

/// The vectors that quantised ones stand for; `None` where the kernel does not serve.
///
/// # Shapes
/// As in [`quantise_on_cpu`], levels and range being views of their kind; `(…, D)` out, in `kind`.
pub fn restore_on_cpu(level: &Tensor, range: &Tensor, levels: Levels, kind: Kind) -> Option<Tensor> {
    let Levels { bits, width, bytes } = levels;
    if !computes(level.device(), kind) || width == 0 {
        return None;
    }
    let like = Tensor::empty([0], (kind, level.device()));
    let [level, range, like] = [level, range, &like].map(pointer);
    // SAFETY: all are live tensors; one result is written.
    let [restored] = made(|result| unsafe { kvtune_restore(level, range, like, bits as i64, width, bytes, result) });
    Some(restored)
}
