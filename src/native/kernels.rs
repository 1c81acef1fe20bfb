//! What the shim computes itself, on the CPU: products of matrices, and the attention of a chunk.
//!
//! As with libtorch's own operations, what goes wrong (shapes that do not fit, memory that runs out) is a panic with libtorch's text.

use std::ffi::c_int;
use std::ptr::null_mut;

use tch::{Device, Kind, Tensor};

use super::autograd::{Raw, check, or_panic, owned, pointer, tensors};

unsafe extern "C" {
    safe fn kvtune_attention_scratch(shape: &AttentionShape, is_backward: c_int) -> i64;
    fn kvtune_product(x: Raw, w: Raw, result: *mut Raw) -> c_int;
    safe fn kvtune_widened_bytes(rows: i64, inner: i64, outer: i64) -> i64;
    fn kvtune_add_product(y: Raw, x: Raw, w: Raw) -> c_int;
    fn kvtune_attend(q: Raw, keys: &RawKeys, from_token: i64, results: *mut Raw) -> c_int;
    fn kvtune_attend_backward(dout: Raw, q: Raw, keys: &RawKeys, out: Raw, lse: Raw, results: *mut Raw) -> c_int;
    fn kvtune_attention_mass(q: Raw, keys: &RawKeys, lse: Raw, first: i64, result: *mut Raw) -> c_int;
}

/// New tensors that `fill` writes.
pub(super) fn made<const N: usize>(fill: impl FnOnce(*mut Raw) -> c_int) -> [Tensor; N] {
    or_panic(tensors(fill)).map(Option::unwrap_or_default)
}

/// The new tensor that `fill` writes.
pub(super) fn made_one(fill: impl FnOnce(*mut Raw) -> c_int) -> Tensor {
    let [one] = made(fill);
    one
}

/// `x wᵀ` without autograd, by the fastest library for the CPU at hand: libtorch's default for f32 leaves half of the vector units of
/// some CPUs unused.
///
/// # Shapes
/// `x (…, i)`, `w (o, i)`, which may be a transposed view; result `(…, o)`.
pub fn product(x: &Tensor, w: &Tensor) -> Tensor {
    // SAFETY: both are live tensors; one result is written.
    made_one(|result| unsafe { kvtune_product(pointer(x), pointer(w), result) })
}

/// Bytes that [`product`] takes for a moment beside its result, where the CPU has no products of bf16 and the factors are widened to f32.
///
/// # Shapes
/// `x (rows, inner)`, `w (outer, inner)`.
pub fn widened_bytes(device: Device, kind: Kind, [rows, inner, outer]: [usize; 3]) -> u64 {
    let is_widened = device == Device::Cpu && kind == Kind::BFloat16;
    if is_widened { kvtune_widened_bytes(rows as i64, inner as i64, outer as i64).max(0) as u64 } else { 0 }
}

/// Adds `x w` to `y` in place, as [`product`] multiplies.
///
/// # Shapes
/// `y (m, o)`, `x (m, i)`, `w (i, o)`.
pub fn add_product(y: &mut Tensor, x: &Tensor, w: &Tensor) {
    // SAFETY: all are live tensors.
    or_panic(check(unsafe { kvtune_add_product(pointer(y), pointer(x), pointer(w)) }));
}

/// What attends to what, laid out as `Shape` in the shim.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AttentionShape {
    pub batch: usize,
    pub heads: usize,
    /// Heads of keys and values.
    pub groups: usize,
    pub tokens: usize,
    pub width: usize,
    /// Keys that it attends to, the chunk's own among them.
    pub keys: usize,
    /// Threads that compute, at least one.
    pub threads: usize,
}

// The shim asserts the same.
const _: () = assert!(size_of::<AttentionShape>() == 56);

impl AttentionShape {
    /// Numbers that [`attend`] and [`attend_backward`] have for a moment, beside what they take and give.
    pub fn scratch(self) -> [u64; 2] {
        [0, 1].map(|is_backward| kvtune_attention_scratch(&self, is_backward).max(0) as u64)
    }
}

/// Whether the shim's kernels serve tensors of this place and kind: attention, norms, gates and rotations.
pub fn computes(device: Device, kind: Kind) -> bool {
    device == Device::Cpu && matches!(kind, Kind::Float | Kind::Double | Kind::BFloat16)
}

/// Keys and values of some slots: of the past, a page of it, or a chunk's own. Clones share the tensors.
#[derive(Debug)]
pub struct KvBlock {
    /// Keys `(B, G, P, D)` of these slots.
    pub k: Tensor,
    /// Values `(B, G, P, D)` of these slots.
    pub v: Tensor,
    /// Further planes `(B, G, P, ·)` of each entry, which attention does not look at.
    pub further: Vec<Tensor>,
    /// Which slots count `(B, G, P)`, bool, where not all of them do.
    pub valid: Option<Tensor>,
    /// How many of the chunk's tokens, from the first on, see each slot `(B, G, P)`, int64, as a sliding window has it; `None` where all do.
    pub visible_until: Option<Tensor>,
}

impl Clone for KvBlock {
    fn clone(&self) -> Self {
        let shared = |mask: &Option<Tensor>| mask.as_ref().map(Tensor::shallow_clone);
        Self { valid: shared(&self.valid), visible_until: shared(&self.visible_until), ..self.map(Tensor::shallow_clone) }
    }
}

impl KvBlock {
    /// Slots that all count, and that all tokens see.
    ///
    /// # Shapes
    /// `(B, G, P, D)` each.
    pub fn new(k: &Tensor, v: &Tensor) -> Self {
        Self { k: k.shallow_clone(), v: v.shallow_clone(), further: Vec::new(), valid: None, visible_until: None }
    }

    /// Keys, values and what else there is, in this order.
    pub fn planes(&self) -> impl Iterator<Item = &Tensor> {
        [&self.k, &self.v].into_iter().chain(&self.further)
    }

    /// The inverse of [`Self::planes`], of slots that all count.
    pub fn of_planes(planes: impl IntoIterator<Item = Tensor>) -> Self {
        let mut planes = planes.into_iter();
        let (k, v) = (planes.next().unwrap_or_default(), planes.next().unwrap_or_default());
        Self { k, v, further: planes.collect(), valid: None, visible_until: None }
    }

    pub fn into_planes(self) -> impl Iterator<Item = Tensor> {
        [self.k, self.v].into_iter().chain(self.further)
    }

    /// Every plane as `f` makes it, of slots that all count.
    pub fn map(&self, f: impl FnMut(&Tensor) -> Tensor) -> Self {
        Self::of_planes(self.planes().map(f))
    }

    pub fn narrow(&self, start: i64, slots: i64) -> Self {
        let some = |x: &Tensor| x.narrow(2, start, slots);
        Self { valid: self.valid.as_ref().map(some), visible_until: self.visible_until.as_ref().map(some), ..self.map(some) }
    }

    /// Blocks side by side, of slots that all count.
    pub fn cat(blocks: &[Self]) -> Self {
        let Some(first) = blocks.first().filter(|_| blocks.len() > 1) else {
            return blocks.first().map_or_else(|| Self::of_planes([]), |only| only.map(Tensor::shallow_clone));
        };
        let plane = |i: usize| Tensor::cat(&blocks.iter().filter_map(|block| block.planes().nth(i)).collect::<Vec<_>>(), 2);
        Self::of_planes((0..first.planes().count()).map(plane))
    }

    pub fn slots(&self) -> i64 {
        self.k.size()[2]
    }

    /// Whether some of its slots do not count, or not for all tokens.
    pub fn is_masked(&self) -> bool {
        self.valid.is_some() || self.visible_until.is_some()
    }
}

/// What decides scores besides queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoreRule {
    /// The factor on `q · k`.
    pub scale: f64,
    /// The most keys that a query sees, if there is a limit: those of positions p − window < k ≤ p. [`KvBlock::visible_until`] tells kernels.
    pub window: Option<usize>,
    /// What no score exceeds, if anything: scores s become cap · tanh(s / cap), before any is hidden (Gemma 2, arXiv 2408.00118, section 2).
    pub soft_cap: Option<f64>,
}

impl ScoreRule {
    /// Scores that are scaled, and nothing else.
    pub fn scaled(scale: f64) -> Self {
        Self { scale, window: None, soft_cap: None }
    }
}

/// What queries attend to, and by which scores, as the shim takes it.
#[repr(C)]
struct RawKeys {
    /// Keys and values of each part, which of its slots count, and until when they are seen; the latter two are null where all are.
    parts: *const [Raw; 4],
    count: usize,
    scale: f64,
    /// 0 where nothing caps scores.
    cap: f64,
}

/// Calls the shim with parts whose tensors are alive.
fn with_keys<T>(parts: &[&KvBlock], rule: ScoreRule, call: impl FnOnce(&RawKeys) -> T) -> T {
    let mask = |mask: &Option<Tensor>| mask.as_ref().map_or(null_mut(), pointer);
    let one = |part: &&KvBlock| [pointer(&part.k), pointer(&part.v), mask(&part.valid), mask(&part.visible_until)];
    let parts: Vec<[Raw; 4]> = parts.iter().map(one).collect();
    call(&RawKeys { parts: parts.as_ptr(), count: parts.len(), scale: rule.scale, cap: rule.soft_cap.unwrap_or(0.0) })
}

/// Attention of a chunk of n tokens to all of some parts, and causally to the last part, which is its own: output, log-sum-exp, and,
/// where a token to begin with is given, the sums of [`attention_mass`], which come for next to nothing here. Computed in f32 for bf16.
///
/// # Shapes
/// `q_bhnd (B, H, n, D)`. Results `(B, H, n, D)` in the kind of the queries, `(B, H, n)` and `(B, G, all keys)`. A query that sees no
/// key at all gets zeros, and minus infinity.
pub fn attend(
    q_bhnd: &Tensor,
    parts: &[&KvBlock],
    rule: ScoreRule,
    first_paying: Option<i64>,
) -> (Tensor, Tensor, Option<Tensor>) {
    let from_token = first_paying.unwrap_or(-1);
    let [out, lse, mass] = with_keys(parts, rule, |keys| {
        // SAFETY: all are live tensors, or null where that is allowed; two results are written, and a third if some token pays.
        or_panic(tensors(|results| unsafe { kvtune_attend(pointer(q_bhnd), keys, from_token, results) }))
    });
    (out.unwrap_or_default(), lse.unwrap_or_default(), mass)
}

/// The backward of [`attend`], given its results: the gradient of the queries, and those of keys and values by part, in f32 for bf16.
///
/// # Shapes
/// `dout_bhnd` and `out_bhnd (B, H, n, D)`, `lse_bhn (B, H, n)`; the rest, and the results, as in [`attend`].
pub fn attend_backward(
    dout_bhnd: &Tensor,
    q_bhnd: &Tensor,
    parts: &[&KvBlock],
    out_bhnd: &Tensor,
    lse_bhn: &Tensor,
    rule: ScoreRule,
) -> (Tensor, Vec<KvBlock>) {
    let [dout, q, out, lse] = [dout_bhnd, q_bhnd, out_bhnd, lse_bhn].map(pointer);
    let mut results = vec![null_mut(); 1 + 2 * parts.len()];
    // SAFETY: all are live tensors, or null where that is allowed; one result for the queries and two for each part are written.
    let call = |keys: &RawKeys| unsafe { kvtune_attend_backward(dout, q, keys, out, lse, results.as_mut_ptr()) };
    or_panic(check(with_keys(parts, rule, call)));
    // SAFETY: the call has succeeded, so each pointer is a new `at::Tensor` that is ours to own.
    let mut results = results.into_iter().filter_map(|tensor| unsafe { owned(tensor) });
    let dq_bhnd = results.next().unwrap_or_default();
    let dk: Vec<Tensor> = results.by_ref().take(parts.len()).collect();
    (dq_bhnd, dk.into_iter().zip(results).map(|(dk, dv)| KvBlock::of_planes([dk, dv])).collect())
}

/// The attention mass to each key by the queries from token `first` on, summed over them and over the heads of a group; nothing to a
/// slot that does not count.
///
/// # Shapes
/// `lse_bhn (B, H, n)`, `+inf` for a query that does not count; the rest as in [`attend`]; result `(B, G, all keys)`, in f32 for bf16.
pub fn attention_mass(q_bhnd: &Tensor, parts: &[&KvBlock], lse_bhn: &Tensor, rule: ScoreRule, first_token: i64) -> Tensor {
    let [q, lse] = [q_bhnd, lse_bhn].map(pointer);
    // SAFETY: all are live tensors, or null where that is allowed; one result is written.
    with_keys(parts, rule, |keys| made_one(|result| unsafe { kvtune_attention_mass(q, keys, lse, first_token, result) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a CPU without products of bf16 the larger matrix is widened in several pieces.
    #[test]
    fn products_of_bf16_are_those_of_f64_rounded_once() {
        tch::manual_seed(1);
        let drawn = |size: &[i64]| Tensor::randn(size, (Kind::Float, Device::Cpu)).to_kind(Kind::BFloat16);
        let near = |found: &Tensor, expected: &Tensor| {
            assert_eq!((found.kind(), found.size()), (Kind::BFloat16, expected.size()));
            let error = (found.to_kind(Kind::Double) - expected).abs() / (expected.abs() + 0.05);
            assert!(error.max().double_value(&[]) < 1.0 / 250.0, "{:?}", found.size());
        };
        let wide = |x: &Tensor| x.to_kind(Kind::Double);
        for (rows, width, out) in [(1, 8, 3), (2, 65, 70), (3, 65, 70), (300, 33, 257), (4, 3000, 6000)] {
            let (x, w) = (drawn(&[rows, width]), drawn(&[out, width]));
            let transposed = w.transpose(0, 1).contiguous();
            let expected = wide(&x).matmul(&wide(&transposed));
            near(&product(&x, &w), &expected);
            near(&product(&x, &transposed.transpose(0, 1)), &expected);
            let (mut y, first) = (drawn(&[rows, out]), drawn(&[rows, out]));
            y.copy_(&first);
            add_product(&mut y, &x, &transposed);
            let size = expected.abs().max().double_value(&[]);
            let error = (wide(&y) - expected - wide(&first)).abs().max().double_value(&[]);
            assert!(error < size / 100.0, "{rows} × {width} × {out}: {error}");
        }
        let nothing = product(&drawn(&[0, 4]), &drawn(&[5, 4]));
        assert_eq!(nothing.size(), [0, 5]);
    }

    /// In blocks of 64 rows where the factors are thin, and with the rest of them.
    #[test]
    fn added_products_are_those_of_f64() {
        let drawn = |size: &[i64]| Tensor::randn(size, (Kind::Float, Device::Cpu));
        for (rows, inner, out) in [(0, 8, 5), (1, 8, 5), (64, 1, 48), (200, 8, 70), (192, 64, 33), (130, 65, 7)] {
            let (x, w, first) = (drawn(&[rows, inner]), drawn(&[inner, out]), drawn(&[rows, out]));
            let expected = first.to_kind(Kind::Double) + x.to_kind(Kind::Double).matmul(&w.to_kind(Kind::Double));
            for (x, w) in [(x.shallow_clone(), w.shallow_clone()), (x.t_copy().t_(), w.t_copy().t_())] {
                let mut y = first.copy();
                add_product(&mut y, &x, &w);
                assert!(y.to_kind(Kind::Double).allclose(&expected, 1e-5, 1e-4, false), "{rows} × {inner} × {out}");
            }
        }
        let wrong = || add_product(&mut drawn(&[64, 4]), &drawn(&[64, 8]), &drawn(&[8, 5]));
        assert!(std::panic::catch_unwind(wrong).is_err());
    }
}
