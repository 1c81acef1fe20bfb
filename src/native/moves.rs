//! Rows of a cache that change their places: on the CPU in one pass, and anywhere by libtorch's operations.

use std::ffi::c_int;
use std::ptr;

use tch::{Device, Tensor};
use torch_sys::C_tensor;

use super::autograd::{check, or_panic, pointer};
use super::kernels::{first, made};

unsafe extern "C" {
    fn kvtune_move_rows(x: *mut C_tensor, to: *mut C_tensor, from: *mut C_tensor, saved: *mut *mut C_tensor) -> c_int;
    fn kvtune_move_rows_back(x: *mut C_tensor, to: *mut C_tensor, from: *mut C_tensor, saved: *mut C_tensor) -> c_int;
    fn kvtune_plan_moves(victim: *mut C_tensor, region: i64, results: *mut *mut C_tensor) -> c_int;
}

/// Lets rows `from` take the places of rows `to`, and returns what stood there. A row in both lists must be its own destination.
///
/// # Shapes
/// `x (B, G, C, …)`, whose rows are counted over the first three dimensions; `to`, `from (e)`, i64; result `(e, …)`.
pub fn move_rows(x: &Tensor, to: &Tensor, from: &Tensor) -> Tensor {
    let [x, to, from] = [x, to, from].map(pointer);
    // SAFETY: all are live tensors; one result is written.
    first(made(1, |result| unsafe { kvtune_move_rows(x, to, from, result) }))
}

/// The inverse of [`move_rows`], given what it returned; zeros in its place, where there is nothing.
///
/// # Shapes
/// As there.
pub fn move_rows_back(x: &Tensor, to: &Tensor, from: &Tensor, saved: Option<&Tensor>) {
    let [x, to, from] = [x, to, from].map(pointer);
    // SAFETY: all are live tensors, but for what was saved, which may be null.
    or_panic(check(unsafe { kvtune_move_rows_back(x, to, from, saved.map_or(ptr::null_mut(), pointer)) }));
}

/// For each head its victims in order, those from slot `region` on last; their order; and the slots from `region` on, as many, in order,
/// victims last. On the CPU alone.
///
/// # Shapes
/// `victim (B, G, e)`, i64, all different in a row; out three of the same.
pub fn plan_moves_on_cpu(victim_bge: &Tensor, region: i64) -> Option<[Tensor; 3]> {
    let victim_bge = (victim_bge.device() == Device::Cpu).then(|| victim_bge.contiguous())?;
    // SAFETY: it is a live tensor; three results are written.
    made(3, |results| unsafe { kvtune_plan_moves(pointer(&victim_bge), region, results) }).try_into().ok()
}
