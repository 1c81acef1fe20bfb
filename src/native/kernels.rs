//! What the shim computes itself, on the CPU: products of matrices, and the attention of a chunk.
//!
//! As with libtorch's own operations, what goes wrong (shapes that do not fit, memory that runs out) is a panic with libtorch's text.

use std::ffi::c_int;

use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

use super::autograd::{check, or_panic, pointers};

unsafe extern "C" {
    safe fn kvtune_attention_block(tokens: i64, heads_of_group: i64, keys: i64) -> i64;
    fn kvtune_product(x: *mut C_tensor, w: *mut C_tensor, result: *mut *mut C_tensor) -> c_int;
    fn kvtune_attend(
        q: *mut C_tensor,
        k: *const *mut C_tensor,
        v: *const *mut C_tensor,
        parts: usize,
        scale: f64,
        paying: i64,
        results: *mut *mut C_tensor,
    ) -> c_int;
    fn kvtune_attend_backward(
        dout: *mut C_tensor,
        q: *mut C_tensor,
        k: *const *mut C_tensor,
        v: *const *mut C_tensor,
        parts: usize,
        out: *mut C_tensor,
        lse: *mut C_tensor,
        scale: f64,
        results: *mut *mut C_tensor,
    ) -> c_int;
    fn kvtune_attention_paid(
        q: *mut C_tensor,
        k: *const *mut C_tensor,
        parts: usize,
        lse: *mut C_tensor,
        scale: f64,
        first: i64,
        result: *mut *mut C_tensor,
    ) -> c_int;
}

/// `count` new tensors that `fill` writes.
fn made(count: usize, fill: impl FnOnce(*mut *mut C_tensor) -> c_int) -> Vec<Tensor> {
    let mut results = vec![std::ptr::null_mut(); count];
    or_panic(check(fill(results.as_mut_ptr())));
    // SAFETY: the call has succeeded, so each pointer is a new `at::Tensor` that is ours to own.
    results.into_iter().map(|tensor| unsafe { Tensor::from_ptr(tensor) }).collect()
}

fn first(made: Vec<Tensor>) -> Tensor {
    made.into_iter().next().unwrap_or_default()
}

/// `x wᵀ` without autograd, by the fastest library for the CPU at hand: libtorch's default for f32 leaves half of the vector units of
/// some CPUs unused.
///
/// # Shapes
/// `x (…, i)`, `w (o, i)`, which may be a transposed view; result `(…, o)`.
pub fn product(x: &Tensor, w: &Tensor) -> Tensor {
    // SAFETY: both are live tensors; one result is written.
    first(made(1, |result| unsafe { kvtune_product(x.as_ptr().cast_mut(), w.as_ptr().cast_mut(), result) }))
}

/// How many tokens of a chunk of `tokens` attend at a time to so many keys, with all heads of a group: their scores are there at once.
pub fn attention_block(tokens: u64, heads_of_group: u64, keys: u64) -> u64 {
    kvtune_attention_block(tokens as i64, heads_of_group as i64, keys as i64).max(0) as u64
}

/// Whether the kernels below serve tensors of this place and kind.
pub fn attends(device: Device, kind: Kind) -> bool {
    device == Device::Cpu && matches!(kind, Kind::Float | Kind::Double)
}

/// Attention of a chunk of n tokens to all of some parts, and causally to the last part, which is its own: output, log-sum-exp, and,
/// where a token to begin with is given, the sums of [`attention_paid`], which come for next to nothing here.
///
/// # Shapes
/// `q_bhnd (B, H, n, D)`; keys and values `(B, G, ·, D)` by part. Results `(B, H, n, D)`, `(B, H, n)` and `(B, G, all keys)`.
pub fn attend(
    q_bhnd: &Tensor,
    (k_bgpd, v_bgpd): (&[&Tensor], &[&Tensor]),
    scale: f64,
    first_paying: Option<i64>,
) -> (Tensor, Tensor, Option<Tensor>) {
    let (k, v, parts) = (pointers(k_bgpd), pointers(v_bgpd), k_bgpd.len().min(v_bgpd.len()));
    let (q, paying) = (q_bhnd.as_ptr().cast_mut(), first_paying.unwrap_or(-1));
    let count = 2 + usize::from(first_paying.is_some());
    // SAFETY: all are live tensors; two results are written, and a third if some token pays.
    let results = made(count, |results| unsafe { kvtune_attend(q, k.as_ptr(), v.as_ptr(), parts, scale, paying, results) });
    let mut results = results.into_iter();
    (results.next().unwrap_or_default(), results.next().unwrap_or_default(), results.next())
}

/// What the backward of [`attend`] gives.
#[derive(Debug)]
pub struct AttendGrads {
    /// `(B, H, n, D)`.
    pub dq_bhnd: Tensor,
    /// Of keys, by part.
    pub dk_bgpd: Vec<Tensor>,
    /// Of values, by part.
    pub dv_bgpd: Vec<Tensor>,
}

/// The backward of [`attend`], given its results.
///
/// # Shapes
/// `dout_bhnd` and `out_bhnd (B, H, n, D)`, `lse_bhn (B, H, n)`; the rest as in [`attend`].
pub fn attend_backward(
    dout_bhnd: &Tensor,
    q_bhnd: &Tensor,
    (k_bgpd, v_bgpd): (&[&Tensor], &[&Tensor]),
    (out_bhnd, lse_bhn): (&Tensor, &Tensor),
    scale: f64,
) -> AttendGrads {
    let (k, v, parts) = (pointers(k_bgpd), pointers(v_bgpd), k_bgpd.len().min(v_bgpd.len()));
    let [dout, q, out, lse] = [dout_bhnd, q_bhnd, out_bhnd, lse_bhn].map(|tensor| tensor.as_ptr().cast_mut());
    // SAFETY: all are live tensors; one result for the queries and two for each part are written.
    let results = made(1 + 2 * parts, |results| unsafe {
        kvtune_attend_backward(dout, q, k.as_ptr(), v.as_ptr(), parts, out, lse, scale, results)
    });
    let mut results = results.into_iter();
    let dq_bhnd = results.next().unwrap_or_default();
    let dk_bgpd = results.by_ref().take(parts).collect();
    AttendGrads { dq_bhnd, dk_bgpd, dv_bgpd: results.collect() }
}

/// The attention paid to each key by the queries from token `first` on, summed over them and over the heads of a group.
///
/// # Shapes
/// `lse_bhn (B, H, n)`, `+inf` for a query that does not count; the rest as in [`attend`]; result `(B, G, all keys)`.
pub fn attention_paid(q_bhnd: &Tensor, k_bgpd: &[&Tensor], lse_bhn: &Tensor, scale: f64, first_token: i64) -> Tensor {
    let k = pointers(k_bgpd);
    let (q, lse) = (q_bhnd.as_ptr().cast_mut(), lse_bhn.as_ptr().cast_mut());
    // SAFETY: all are live tensors; one result is written.
    first(made(1, |result| unsafe { kvtune_attention_paid(q, k.as_ptr(), k.len(), lse, scale, first_token, result) }))
}
