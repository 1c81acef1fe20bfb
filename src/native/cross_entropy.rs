//! Cross-entropy of rows of scores, on the CPU.

use std::ffi::c_int;

use tch::Tensor;
use torch_sys::C_tensor;

use super::autograd::pointer;
use super::kernels::made;

unsafe extern "C" {
    fn kvtune_cross_entropy(
        scores: *mut C_tensor,
        targets: *mut C_tensor,
        has_gradient: c_int,
        weight: f64,
        results: *mut *mut C_tensor,
    ) -> c_int;
}

/// Losses `log Σ exp(scores) − scores[target]`, below them 1 where the target is the first of the largest scores, and with `weight` the
/// gradient of `weight · Σ losses`; without autograd.
///
/// # Shapes
/// `scores_nk (N, K)`, f32 or f64 on the CPU; `target_n (N)`, i64; results `(2, N)`, f64, and as the scores.
pub fn cross_entropy(scores_nk: &Tensor, target_n: &Tensor, weight: Option<f64>) -> (Tensor, Option<Tensor>) {
    let [scores, targets] = [scores_nk, target_n].map(pointer);
    let (wants, weight) = (c_int::from(weight.is_some()), weight.unwrap_or_default());
    // SAFETY: both are live tensors; a result is written, and with a gradient a second.
    let made = made(1 + wants as usize, |results| unsafe { kvtune_cross_entropy(scores, targets, wants, weight, results) });
    let mut made = made.into_iter();
    (made.next().unwrap_or_default(), made.next())
}
