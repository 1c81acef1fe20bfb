//! Attention of a chunk to the past and to itself, its backward, and the attention paid to each slot.
//!
//! Flash attention in the sense of Dao 2023 (arXiv 2307.08691): forward keeps the log-sum-exp, backward recomputes the weights. On the
//! CPU one kernel sees past and chunk at once; elsewhere they are parts that are merged by their log-sum-exps.

use std::f64::consts::LOG2_E;

use tch::{Device, Kind, Tensor};

use super::flash::{self, Sight};
use crate::native;
/// Slots below the chunk's region, or a page of them: older than every query of the chunk.
pub use crate::native::Part as Past;

/// An attention output and the log-sum-exp of the scores behind it.
#[derive(Debug)]
pub struct Attended {
    /// `(B, H, n, D)`, in the dtype of the queries.
    pub out_bhnd: Tensor,
    /// `(B, H, n)`, f32 (f64 for f64 inputs).
    pub lse_bhn: Tensor,
}

/// The gradients of one chunk's attention.
#[derive(Debug)]
pub struct AttentionGrads {
    /// `(B, H, n, D)`.
    pub dq_bhnd: Tensor,
    /// Of the chunk's own keys `(B, G, n, D)`.
    pub dk_bgnd: Tensor,
    /// Of the chunk's own values `(B, G, n, D)`.
    pub dv_bgnd: Tensor,
    /// Of the past's keys and values `(B, G, P, D)`, part by part.
    pub past: Vec<(Tensor, Tensor)>,
}

/// The chunk's queries, keys and values, and the softmax scale.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    /// Queries `(B, H, n, D)`; query head `h` belongs to KV head `h / (H / G)`.
    pub q_bhnd: &'a Tensor,
    /// Keys `(B, G, n, D)`.
    pub k_bgnd: &'a Tensor,
    /// Values `(B, G, n, D)`.
    pub v_bgnd: &'a Tensor,
    /// The factor on `q · k`.
    pub scale: f64,
    /// Which of the keys count `(B, G, n)`, bool, where not all of them do.
    pub in_use_bgn: Option<&'a Tensor>,
}

/// Some queries of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queries {
    /// All of them.
    All,
    /// So many of the last, or all where there are fewer.
    Last(usize),
}

impl Queries {
    /// The first of them among `tokens`.
    fn first(self, tokens: i64) -> i64 {
        match self {
            Self::All => 0,
            Self::Last(count) => (tokens - count as i64).max(0),
        }
    }
}

/// What the chunk's queries see of it.
fn sight_of<'a>(past: &Past<'a>) -> Sight<'a> {
    past.in_use_bgp.map_or(Sight::All, Sight::InUse)
}

impl Chunk<'_> {
    fn sight(&self) -> Sight<'_> {
        self.in_use_bgn.map_or(Sight::Causal, Sight::CausalInUse)
    }

    /// Query heads of a KV head.
    fn per_group(&self) -> f64 {
        (self.q_bhnd.size()[1] / num_kv_heads(self)) as f64
    }
}

/// Keys and values part by part, the chunk's own last, where one kernel sees them all at once.
fn at_once<'a>(chunk: &Chunk<'a>, past: &[Past<'a>]) -> Option<Vec<Past<'a>>> {
    #[cfg(test)]
    if crate::sabotage::is_active(crate::sabotage::Sabotage::MergeMissing) {
        return None;
    }
    let own = Past { k_bgpd: chunk.k_bgnd, v_bgpd: chunk.v_bgnd, in_use_bgp: chunk.in_use_bgn };
    native::computes(chunk.q_bhnd.device(), chunk.q_bhnd.kind()).then(|| past.iter().copied().chain([own]).collect())
}

/// The kernel that attends on a device, in words; forward and backward use the same.
pub fn kernel(device: Device, kind: Kind) -> &'static str {
    if native::computes(device, kind) { "kvtune's CPU kernel" } else { "blockwise" }
}

/// Attends a chunk to its past (all of it, part by part) and causally to itself.
///
/// # Shapes
/// As in [`Chunk`] and [`Past`].
pub fn attend(chunk: Chunk<'_>, past: &[Past<'_>]) -> Attended {
    attend_and_sum(chunk, past, None).0
}

/// As [`attend`], and where some queries are asked for, and the kernel makes it on the way, the attention that they paid, as in
/// [`attention_paid`].
pub fn attend_and_sum(chunk: Chunk<'_>, past: &[Past<'_>], asked: Option<Queries>) -> (Attended, Option<Tensor>) {
    let Some(parts) = at_once(&chunk, past) else {
        return (attend_in_parts(chunk, past), None);
    };
    let first = asked.map(|queries| queries.first(chunk.q_bhnd.size()[2]));
    let (out_bhnd, lse_bhn, sums) = native::attend(chunk.q_bhnd, &parts, chunk.scale, first);
    (Attended { out_bhnd, lse_bhn }, sums.map(|sums| sums / chunk.per_group()))
}

fn attend_in_parts(chunk: Chunk<'_>, past: &[Past<'_>]) -> Attended {
    let own = flash::forward(chunk.q_bhnd, chunk.k_bgnd, chunk.v_bgnd, chunk.sight(), chunk.scale);
    past.iter().fold(own, |merged, past| {
        let old = flash::forward(chunk.q_bhnd, past.k_bgpd, past.v_bgpd, sight_of(past), chunk.scale);
        merge(&old, &merged)
    })
}

/// The backward of [`attend`]: each part's flash backward, with the *merged* output and log-sum-exp, so that the parts add up.
///
/// # Shapes
/// `dout_bhnd (B, H, n, D)`; the rest as in [`AttentionGrads`].
pub fn attend_backward(dout_bhnd: &Tensor, chunk: Chunk<'_>, past: &[Past<'_>], merged: &Attended) -> AttentionGrads {
    let Some(parts) = at_once(&chunk, past) else {
        return attend_backward_in_parts(dout_bhnd, chunk, past, merged);
    };
    let out = (&merged.out_bhnd, &merged.lse_bhn);
    let grads = native::attend_backward(dout_bhnd, chunk.q_bhnd, &parts, out, chunk.scale);
    let mut past: Vec<(Tensor, Tensor)> = grads.dk_bgpd.into_iter().zip(grads.dv_bgpd).collect();
    let (dk_bgnd, dv_bgnd) = past.pop().unwrap_or_default();
    AttentionGrads { dq_bhnd: grads.dq_bhnd, dk_bgnd, dv_bgnd, past }
}

fn attend_backward_in_parts(dout_bhnd: &Tensor, chunk: Chunk<'_>, past: &[Past<'_>], merged: &Attended) -> AttentionGrads {
    let (mut dq_bhnd, dk_bgnd, dv_bgnd) = flash::backward(dout_bhnd, chunk, merged, chunk.sight());
    let mut grads = Vec::with_capacity(past.len());
    for past in past {
        let old = Chunk { k_bgnd: past.k_bgpd, v_bgnd: past.v_bgpd, in_use_bgn: None, ..chunk };
        let (dq, dk, dv) = flash::backward(dout_bhnd, old, merged, sight_of(past));
        dq_bhnd += dq;
        grads.push((dk, dv));
    }
    AttentionGrads { dq_bhnd, dk_bgnd, dv_bgnd, past: grads }
}

/// The attention paid to each slot by some queries of a chunk: `(1/R) Σ_heads Σ_i exp(q_i · k_c · scale −
/// lse_i)`, past slots first, then the chunk's own. Queries are taken in blocks, so that no `(n × slots)` matrix is kept.
///
/// # Shapes
/// `lse_bhn (B, H, n)`, `+inf` for a query that does not count; result `(B, G, P + n)` in f32 (f64 for f64 inputs).
pub fn attention_paid(chunk: Chunk<'_>, past: &[Past<'_>], lse_bhn: &Tensor, queries: Queries) -> Tensor {
    if let Some(parts) = at_once(&chunk, past) {
        let first = queries.first(chunk.q_bhnd.size()[2]);
        return native::attention_paid(chunk.q_bhnd, &parts, lse_bhn, chunk.scale, first) / chunk.per_group();
    }
    paid_in_blocks(chunk, past, lse_bhn, queries)
}

fn paid_in_blocks(chunk: Chunk<'_>, past: &[Past<'_>], lse_bhn: &Tensor, queries: Queries) -> Tensor {
    let payers = Payers::new(&chunk, lse_bhn, queries);
    // A slot that is not in use is paid nothing, whatever stands in it.
    let to_past = |past: &Past<'_>| {
        let paid = payers.pay(past.k_bgpd, false);
        let Some(in_use) = past.in_use_bgp else { return paid };
        paid.masked_fill(&in_use.logical_not().view(&paid.size()[..]), 0.0)
    };
    let mut parts: Vec<Tensor> = past.iter().map(to_past).collect();
    parts.push(payers.pay(chunk.k_bgnd, true));
    let paid = Tensor::cat(&parts, 1) / chunk.per_group();
    paid.view([-1, num_kv_heads(&chunk), paid.size()[1]])
}

/// Scores per block of [`Payers::pay`], which should stay in a core's cache between the product, the power and the sum.
const PAID_SCORES: i64 = 1 << 18;
/// Queries per block, at least and at most: fewer make the product slow, and more waste it above the diagonal.
const PAID_BLOCKS: (i64, i64) = (16, 64);

/// The queries that pay: one product with a key gives `(q · k · scale − lse) log₂ e`, as the query has one more number, −lse, and each
/// key a 1. Weights are powers of 2: libtorch leaves those of e to a library that is three times slower on some CPUs.
struct Payers {
    /// `(B·G, n·R, D + 1)`: a token's heads stand together, so that a block of tokens is a range.
    query: Tensor,
    per_group: i64,
    /// Index in the chunk of the first token that pays, and how many do.
    first: i64,
    count: i64,
}

impl Payers {
    fn new(chunk: &Chunk<'_>, lse_bhn: &Tensor, queries: Queries) -> Self {
        let (b, h, n, d) = chunk.q_bhnd.size4().unwrap_or_default();
        let (groups, count) = (num_kv_heads(chunk), n - queries.first(n));
        let per_group = h / groups;
        let q = chunk.q_bhnd.narrow(2, n - count, count).to_kind(lse_bhn.kind()) * (chunk.scale * LOG2_E);
        let minus_lse = lse_bhn.narrow(2, n - count, count).unsqueeze(-1) * -LOG2_E;
        let query = Tensor::cat(&[q, minus_lse], -1).view([b * groups, per_group, count, d + 1]).transpose(1, 2);
        Self { query: query.reshape([b * groups, count * per_group, d + 1]), per_group, first: n - count, count }
    }

    /// What they pay to a part's keys, the sum over the heads of a group `(B·G, slots)`.
    fn pay(&self, keys_bgcd: &Tensor, causal: bool) -> Tensor {
        let (b, g, slots, d) = keys_bgcd.size4().unwrap_or_default();
        let options = (self.query.kind(), self.query.device());
        let keys = Tensor::ones([b, g, slots, d + 1], options);
        keys.narrow(3, 0, d).copy_(keys_bgcd);
        let keys = keys.view([b * g, slots, d + 1]).transpose(-1, -2);
        let rows = b * g * self.per_group;
        let block = (PAID_SCORES / (rows * slots).max(1)).clamp(PAID_BLOCKS.0, PAID_BLOCKS.1).min(self.count);
        // One buffer for all blocks: new memory from the system would cost as much as the sums.
        let buffer = Tensor::empty([rows * block * slots], options);
        let paid = Tensor::zeros([b * g, slots], options);
        for start in (0..self.count).step_by(block.max(1) as usize) {
            let len = block.min(self.count - start);
            // A causal block sees the keys up to its own last query only.
            let width = if causal { self.first + start + len } else { slots };
            let scores = buffer.narrow(0, 0, rows * len * width).view([b * g, len * self.per_group, width]);
            let query = self.query.narrow(1, start * self.per_group, len * self.per_group);
            let weight = query.bmm_out(&scores, &keys.narrow(2, 0, width)).exp2_();
            if causal {
                let mut own = weight.narrow(2, width - len, len).view([b * g, len, self.per_group, len]);
                // What a query does not see may be infinitely more than it sees, and no product would make it nothing.
                let later = Tensor::ones([len, len], (Kind::Bool, options.1)).triu(1).unsqueeze(1);
                let _ = own.masked_fill_(&later, 0.0);
            }
            let _ = paid.narrow(1, 0, width).g_add_(&weight.sum_dim_intlist(&[1i64][..], false, options.0));
        }
        paid
    }
}

fn num_kv_heads(chunk: &Chunk<'_>) -> i64 {
    chunk.k_bgnd.size()[1]
}

fn merge(a: &Attended, b: &Attended) -> Attended {
    let lse_bhn = a.lse_bhn.logaddexp(&b.lse_bhn);
    #[cfg(test)]
    if crate::sabotage::is_active(crate::sabotage::Sabotage::MergeMissing) {
        return Attended { out_bhnd: &a.out_bhnd + &b.out_bhnd, lse_bhn };
    }
    let weight = |part: &Attended| (&part.lse_bhn - &lse_bhn).exp().unsqueeze(-1);
    let kind = a.out_bhnd.kind();
    let wide = lse_bhn.kind();
    let out = a.out_bhnd.to_kind(wide) * weight(a) + b.out_bhnd.to_kind(wide) * weight(b);
    Attended { out_bhnd: out.to_kind(kind), lse_bhn }
}

/// The kind in which sums over many tokens are kept: f64 for f64, else f32.
pub fn accumulation_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;

    const OPTS: (Kind, Device) = (Kind::Double, Device::Cpu);

    /// Plain softmax attention over past and chunk, under autograd.
    fn naive(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64) -> (Tensor, Tensor) {
        let (r, n, total) = (q.size()[1] / k.size()[1], q.size()[2], k.size()[2]);
        let (k, v) = (k.repeat_interleave_self_int(r, 1, None), v.repeat_interleave_self_int(r, 1, None));
        let mask = Tensor::ones([n, total], (Kind::Bool, Device::Cpu)).tril(total - n).logical_not();
        let scores = (q.matmul(&k.transpose(-1, -2)) * scale).masked_fill(&mask, f64::NEG_INFINITY);
        let weights = scores.softmax(-1, Kind::Double);
        (weights.matmul(&v), weights)
    }

    fn worst(a: &Tensor, b: &Tensor) -> f64 {
        (a - b).abs().max().double_value(&[])
    }

    const ASKED: [Queries; 4] = [Queries::All, Queries::Last(1), Queries::Last(3), Queries::Last(100)];

    /// The two ways: one kernel for past and chunk, and parts that are merged, which serves other devices.
    struct Way {
        attend: fn(Chunk<'_>, &[Past<'_>]) -> Attended,
        backward: fn(&Tensor, Chunk<'_>, &[Past<'_>], &Attended) -> AttentionGrads,
        paid: fn(Chunk<'_>, &[Past<'_>], &Tensor, Queries) -> Tensor,
    }

    const WAYS: [Way; 2] = [
        Way { attend, backward: attend_backward, paid: attention_paid },
        Way { attend: attend_in_parts, backward: attend_backward_in_parts, paid: paid_in_blocks },
    ];

    #[test]
    fn both_ways_equal_plain_attention_forward_backward_and_in_sums() {
        for (n, past, h, g, d) in [
            (5, 7, 6, 2, 8),
            (1, 3, 4, 4, 8),
            (70, 9, 8, 1, 8),
            (4, 0, 2, 2, 8),
            (130, 300, 4, 2, 14),
            (1, 259, 7, 1, 80),
            (300, 65, 14, 2, 10),
        ] {
            let (b, scale) = (2, 0.3);
            let q = Tensor::randn([b, h, n, d], OPTS).set_requires_grad(true);
            let k = Tensor::randn([b, g, past + n, d], OPTS).set_requires_grad(true);
            let v = Tensor::randn([b, g, past + n, d], OPTS).set_requires_grad(true);
            let dout = Tensor::randn([b, n, h, d], OPTS).transpose(1, 2);
            let (expected, weights) = naive(&q, &k, &v, scale);
            (&expected * &dout).sum(Kind::Double).backward();

            let (q0, k0, v0) = (q.detach(), k.detach(), v.detach());
            let (ko, vo) = (k0.narrow(2, 0, past).contiguous(), v0.narrow(2, 0, past).contiguous());
            let (kn, vn) = (k0.narrow(2, past, n).contiguous(), v0.narrow(2, past, n).contiguous());
            // The past as one part, and as two pages.
            let cut = past / 2;
            let pages = [(0, cut), (cut, past - cut)].map(|(start, len)| (ko.narrow(2, start, len), vo.narrow(2, start, len)));
            let pages: Vec<Past<'_>> = pages
                .iter()
                .filter(|p| p.0.size()[2] > 0)
                .map(|(k, v)| Past { k_bgpd: k, v_bgpd: v, in_use_bgp: None })
                .collect();
            let chunk = Chunk { q_bhnd: &q0, k_bgnd: &kn, v_bgnd: &vn, scale, in_use_bgn: None };
            for way in WAYS {
                let merged = (way.attend)(chunk, &pages);
                assert!(worst(&merged.out_bhnd, &expected) < 1e-13);

                let grads = (way.backward)(&dout, chunk, &pages, &merged);
                let all = |old: fn(&(Tensor, Tensor)) -> &Tensor, new| {
                    Tensor::cat(&grads.past.iter().map(old).chain([new]).collect::<Vec<_>>(), 2)
                };
                assert!(worst(&grads.dq_bhnd, &q.grad()) < 1e-12);
                assert!(worst(&all(|p| &p.0, &grads.dk_bgnd), &k.grad()) < 1e-12);
                assert!(worst(&all(|p| &p.1, &grads.dv_bgnd), &v.grad()) < 1e-12);

                for queries in ASKED {
                    let on_the_way = attend_and_sum(chunk, &pages, Some(queries)).1.unwrap();
                    let paid = (way.paid)(chunk, &pages, &merged.lse_bhn, queries);
                    let first = queries.first(n);
                    let weights = weights.narrow(2, first, n - first);
                    let sums = weights.sum_dim_intlist(&[2i64][..], false, Kind::Double).view([b, g, h / g, past + n]);
                    let mean = sums.mean_dim(&[2i64][..], false, Kind::Double);
                    assert!(worst(&paid, &mean) < 1e-12 && worst(&on_the_way, &mean) < 1e-12);
                }
            }
        }
    }

    /// Output, log-sum-exp, gradients of values and keys, then what is added up over the tasks: dq and the sums.
    fn everything(chunk: Chunk<'_>, past: &[Past<'_>], dout: &Tensor) -> Vec<Tensor> {
        let (attended, sums) = attend_and_sum(chunk, past, Some(Queries::All));
        let grads = attend_backward(dout, chunk, past, &attended);
        let mut all = vec![attended.out_bhnd, attended.lse_bhn, grads.dk_bgnd, grads.dv_bgnd];
        all.extend(grads.past.into_iter().flat_map(|(dk, dv)| [dk, dv]));
        all.extend([grads.dq_bhnd, sums.unwrap()]);
        all
    }

    #[test]
    fn the_kernel_gives_on_any_number_of_threads_the_same_numbers_and_twice_the_same_bits() {
        tch::manual_seed(8);
        let threads = tch::get_num_threads();
        // One head of keys is divided among the threads, several are shared out.
        for (h, g, d) in [(7, 1, 14), (8, 2, 32)] {
            let float = (Kind::Float, Device::Cpu);
            let [q, dout] = [h, h].map(|heads| Tensor::randn([1, heads, 300, d], float));
            let [k, v, old_k, old_v] = [300, 300, 700, 700].map(|tokens| Tensor::randn([1, g, tokens, d], float));
            let chunk = Chunk { q_bhnd: &q, k_bgnd: &k, v_bgnd: &v, scale: 0.2, in_use_bgn: None };
            let past = [Past { k_bgpd: &old_k, v_bgpd: &old_v, in_use_bgp: None }];
            let run = |threads: i32| {
                tch::set_num_threads(threads);
                everything(chunk, &past, &dout)
            };
            let one = run(1);
            for several in [2, 3, 4] {
                let (some, again) = (run(several), run(several));
                assert!(some.iter().zip(&again).all(|(a, b)| a.equal(b)));
                assert!(one.iter().zip(&some).take(6).all(|(a, b)| a.equal(b)));
                assert!(one.iter().zip(&some).all(|(a, b)| a.allclose(b, 1e-5, 1e-5, false)));
            }
            tch::set_num_threads(threads);

            let wide = |x: &Tensor| x.to_kind(Kind::Double);
            let [q, k, v, old_k, old_v, dout] = [&q, &k, &v, &old_k, &old_v, &dout].map(wide);
            let chunk = Chunk { q_bhnd: &q, k_bgnd: &k, v_bgnd: &v, scale: 0.2, in_use_bgn: None };
            let past = [Past { k_bgpd: &old_k, v_bgpd: &old_v, in_use_bgp: None }];
            for (i, (single, double)) in one.iter().zip(everything(chunk, &past, &dout)).enumerate() {
                assert!(worst(&wide(single), &double) < 2e-5, "{i}: {:.1e}", worst(&wide(single), &double));
            }
        }
    }

    #[test]
    fn tasks_are_shared_out_among_threads() {
        let threads = tch::get_num_threads();
        let seen = [1, 2, 3].map(|threads| {
            tch::set_num_threads(threads);
            native::threads_at_work()
        });
        tch::set_num_threads(threads);
        assert_eq!(seen, [1, 2, 3]);
    }

    /// As a projection leaves it: tokens before heads in memory, so that `(B, heads, tokens, D)` is a view.
    fn scattered(b: i64, heads: i64, tokens: i64, d: i64) -> Tensor {
        Tensor::randn([b, tokens, heads, d], (Kind::Float, Device::Cpu)).transpose(1, 2)
    }

    #[test]
    fn attention_paid_in_single_precision_is_that_of_a_dense_softmax_without_the_pads() {
        tch::manual_seed(5);
        // Past slots, columns, and how many of them are pads in the second row; blocks of 64 queries end evenly or not.
        for (past, n, pads, h, g) in [(0, 9, 0, 4, 2), (40, 7, 3, 8, 1), (33, 64, 64, 6, 2), (300, 130, 61, 4, 4)] {
            let (b, d, scale) = (2, 16, 0.25);
            let (q, k, v) = (scattered(b, h, n, d), scattered(b, g, past + n, d), scattered(b, g, past + n, d));
            let double = |x: &Tensor| x.to_kind(Kind::Double);
            let (_, weights) = naive(&double(&q), &double(&k), &double(&v), scale);
            let _ = weights.get(1).narrow(1, n - pads, pads).zero_();

            let (kn, vn) = (k.narrow(2, past, n), v.narrow(2, past, n));
            let page = Past { k_bgpd: &k.narrow(2, 0, past), v_bgpd: &v.narrow(2, 0, past), in_use_bgp: None };
            let pages = if past > 0 { vec![page] } else { Vec::new() };
            let chunk = Chunk { q_bhnd: &q, k_bgnd: &kn, v_bgnd: &vn, scale, in_use_bgn: None };
            let lse = attend(chunk, &pages).lse_bhn;
            let _ = lse.get(1).narrow(1, n - pads, pads).fill_(f64::INFINITY);
            for queries in ASKED {
                let paid = attention_paid(chunk, &pages, &lse, queries);
                let first = queries.first(n);
                let sums = weights.narrow(2, first, n - first).sum_dim_intlist(&[2i64][..], false, Kind::Double);
                let expected = sums.view([b, g, h / g, past + n]).mean_dim(&[2i64][..], false, Kind::Double);
                assert_eq!(paid.kind(), Kind::Float);
                let error = ((double(&paid) - &expected).abs() / expected.clamp_min(1.0)).max().double_value(&[]);
                assert!(error <= 1e-6, "{past} slots, {n} columns, {pads} pads, {queries:?}: {error:.1e}");
            }
        }
    }

    #[test]
    fn a_head_that_uses_no_slot_sees_its_chunk_alone() {
        let (q, own) = (Tensor::randn([1, 4, 3, 8], OPTS), Tensor::randn([1, 2, 3, 8], OPTS));
        let (old, dout) = (Tensor::randn([1, 2, 5, 8], OPTS), Tensor::randn([1, 4, 3, 8], OPTS));
        let in_use = Tensor::from_slice(&[true, false]).view([1, 2, 1]).expand([1, 2, 5], false);
        let chunk = Chunk { q_bhnd: &q, k_bgnd: &own, v_bgnd: &own, scale: 0.5, in_use_bgn: None };
        let past = [Past { k_bgpd: &old, v_bgpd: &old, in_use_bgp: Some(&in_use) }];
        let (with, without) = (attend(chunk, &past), attend(chunk, &[]));
        let alone = |x: &Tensor| x.narrow(1, 2, 2);
        assert!(worst(&alone(&with.out_bhnd), &alone(&without.out_bhnd)) < 1e-15);
        assert!(worst(&alone(&with.lse_bhn), &alone(&without.lse_bhn)) < 1e-15);
        let (with, without) = (attend_backward(&dout, chunk, &past, &with), attend_backward(&dout, chunk, &[], &without));
        assert!(worst(&alone(&with.dq_bhnd), &alone(&without.dq_bhnd)) < 1e-14);
        assert!(with.past[0].0.get(0).get(1).abs().max().double_value(&[]) == 0.0);
        let lse = attend(chunk, &past).lse_bhn;
        assert!(
            attention_paid(chunk, &past, &lse, Queries::All).get(0).get(1).narrow(0, 0, 5).abs().max().double_value(&[]) == 0.0
        );
    }

    #[test]
    fn slots_that_do_not_count_are_left_out_wherever_they_lie() {
        tch::manual_seed(3);
        let used = |b, g, slots| Tensor::rand([b, g, slots], OPTS).gt(0.4);
        for (n, past, h, g) in [(5, 7, 6, 2), (70, 300, 4, 4), (260, 520, 2, 1)] {
            let (b, d, scale) = (2, 8, 0.4);
            let [q, dout] = [h, h].map(|heads| Tensor::randn([b, heads, n, d], OPTS));
            let [k, v] = [n, n].map(|tokens| Tensor::randn([b, g, tokens, d], OPTS));
            let [old_k, old_v] = [past, past].map(|slots| Tensor::randn([b, g, slots, d], OPTS));
            let (own_used, old_used) = (used(b, g, n), used(b, g, past));
            // Everybody sees something, or the two ways say nothing in their own words.
            let _ = old_used.narrow(2, past / 2, 1).fill_(1);
            let chunk = Chunk { q_bhnd: &q, k_bgnd: &k, v_bgnd: &v, scale, in_use_bgn: Some(&own_used) };
            let pages = [Past { k_bgpd: &old_k, v_bgpd: &old_v, in_use_bgp: Some(&old_used) }];
            let [one, other] = WAYS.map(|way| {
                let merged = (way.attend)(chunk, &pages);
                let grads = (way.backward)(&dout, chunk, &pages, &merged);
                let paid = (way.paid)(chunk, &pages, &merged.lse_bhn, Queries::Last(4)).narrow(2, 0, past);
                let (past_dk, past_dv) = grads.past.into_iter().next().unwrap();
                [merged.out_bhnd, merged.lse_bhn, paid, grads.dq_bhnd, grads.dk_bgnd, grads.dv_bgnd, past_dk, past_dv]
            });
            for (i, (one, other)) in one.iter().zip(&other).enumerate() {
                assert!(worst(one, other) < 1e-12, "{i} of {n} tokens and {past} slots: {:.1e}", worst(one, other));
            }
        }
    }

    #[test]
    fn bf16_is_attended_to_in_single_precision() {
        tch::manual_seed(4);
        let made = |heads, tokens| Tensor::randn([1, heads, tokens, 16], OPTS).to_kind(Kind::BFloat16);
        let (q, dout, [k, v, old_k, old_v]) = (made(4, 40), made(4, 40), [40, 40, 290, 290].map(|tokens| made(2, tokens)));
        let run = |kind: Kind| {
            let all = [&q, &k, &v, &old_k, &old_v, &dout].map(|x| x.to_kind(kind));
            let chunk = Chunk { q_bhnd: &all[0], k_bgnd: &all[1], v_bgnd: &all[2], scale: 0.2, in_use_bgn: None };
            let pages = [Past { k_bgpd: &all[3], v_bgpd: &all[4], in_use_bgp: None }];
            let attended = attend(chunk, &pages);
            let grads = attend_backward(&all[5], chunk, &pages, &attended);
            let past = grads.past.into_iter().next().unwrap();
            [attended.out_bhnd, grads.dq_bhnd, attended.lse_bhn, grads.dk_bgnd, grads.dv_bgnd, past.0, past.1]
        };
        let (narrow, wide) = (run(Kind::BFloat16), run(Kind::Float));
        let kinds = [Kind::BFloat16, Kind::BFloat16, Kind::Float, Kind::Float, Kind::Float, Kind::Float, Kind::Float];
        assert_eq!(narrow.each_ref().map(Tensor::kind), kinds);
        // Output and dq are rounded once; the backward takes the rounded output.
        for (narrow, wide) in narrow.iter().zip(&wide) {
            let error = worst(&narrow.to_kind(Kind::Float), wide) / wide.abs().max().double_value(&[]);
            assert!(error < 4e-3, "{error:.1e}");
        }
    }

    #[test]
    fn a_query_with_infinite_log_sum_exp_pays_nothing() {
        let q = Tensor::randn([1, 2, 3, 4], OPTS);
        let k = Tensor::randn([1, 1, 3, 4], OPTS);
        let chunk = Chunk { q_bhnd: &q, k_bgnd: &k, v_bgnd: &k, scale: 0.5, in_use_bgn: None };
        let lse = attend(chunk, &[]).lse_bhn;
        let _ = lse.narrow(2, 1, 2).fill_(f64::INFINITY);
        let paid = attention_paid(chunk, &[], &lse, Queries::All);
        assert!((paid.sum(Kind::Double).double_value(&[]) - 1.0).abs() < 1e-12);
    }
}
