//! Attention of a chunk to the past and to itself, as two unmasked parts merged by their log-sum-exps, and its backward.
//!
//! Flash attention in the sense of Dao 2023 (arXiv 2307.08691): forward keeps the log-sum-exp, backward recomputes the weights.

use tch::{Kind, Tensor};

use super::flash;

/// An attention output and the log-sum-exp of the scores behind it.
#[derive(Debug)]
pub struct Attended {
    /// `(B, H, n, D)`, in the dtype of the queries.
    pub out_bhnd: Tensor,
    /// `(B, H, n)`, f32 (f64 for f64 inputs).
    pub lse_bhn: Tensor,
}

/// The slots below the chunk's region: older than every query of the chunk.
#[derive(Debug, Clone, Copy)]
pub struct Past<'a> {
    /// Keys `(B, G, P, D)`.
    pub k_bgpd: &'a Tensor,
    /// Values `(B, G, P, D)`.
    pub v_bgpd: &'a Tensor,
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
    /// Of the past's keys and values `(B, G, P, D)`.
    pub past: Option<(Tensor, Tensor)>,
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
}

/// Attends a chunk to its past (all of it) and causally to itself.
///
/// # Shapes
/// As in [`Chunk`] and [`Past`]; `past` is `None` where there are no older slots.
pub fn attend(chunk: Chunk<'_>, past: Option<Past<'_>>) -> Attended {
    let own = flash::forward(chunk.q_bhnd, chunk.k_bgnd, chunk.v_bgnd, true, chunk.scale);
    let Some(past) = past else { return own };
    let folded = fold(chunk.q_bhnd, num_kv_heads(&chunk));
    let old = flash::forward(&folded, past.k_bgpd, past.v_bgpd, false, chunk.scale);
    merge(&unfold(&old, chunk.q_bhnd), &own)
}

/// The backward of [`attend`]: each part's flash backward, with the *merged* output and log-sum-exp, so that the parts add up.
///
/// # Shapes
/// `dout_bhnd (B, H, n, D)`; the rest as in [`AttentionGrads`].
pub fn attend_backward(dout_bhnd: &Tensor, chunk: Chunk<'_>, past: Option<Past<'_>>, merged: &Attended) -> AttentionGrads {
    let own = Chunk { ..chunk };
    let (dq, dk_bgnd, dv_bgnd) = flash::backward(dout_bhnd, own, merged, true);
    let Some(past) = past else { return AttentionGrads { dq_bhnd: dq, dk_bgnd, dv_bgnd, past: None } };
    let groups = num_kv_heads(&chunk);
    let folded = Attended { out_bhnd: fold(&merged.out_bhnd, groups), lse_bhn: fold_lse(&merged.lse_bhn, groups) };
    let q = fold(chunk.q_bhnd, groups);
    let old = Chunk { q_bhnd: &q, k_bgnd: past.k_bgpd, v_bgnd: past.v_bgpd, scale: chunk.scale };
    let (dq_old, dk_old, dv_old) = flash::backward(&fold(dout_bhnd, groups), old, &folded, false);
    let dq_bhnd = dq + dq_old.reshape(chunk.q_bhnd.size());
    AttentionGrads { dq_bhnd, dk_bgnd, dv_bgnd, past: Some((dk_old, dv_old)) }
}

/// The attention paid to each slot by a chunk: `(1/R) Σ_heads Σ_i exp(q_i · k_c · scale − lse_i)`, past slots first, then the
/// chunk's own. Queries are taken in blocks, so that no `(n × slots)` matrix is kept.
///
/// # Shapes
/// `lse_bhn (B, H, n)`, `+inf` for a query that does not count; result `(B, G, P + n)` in f32 (f64 for f64 inputs).
pub fn attention_paid(chunk: Chunk<'_>, past: Option<Past<'_>>, lse_bhn: &Tensor) -> Tensor {
    let own = paid_by_blocks(&chunk, chunk.k_bgnd, lse_bhn, true);
    match past {
        None => own,
        Some(past) => Tensor::cat(&[paid_by_blocks(&chunk, past.k_bgpd, lse_bhn, false), own], 2),
    }
}

/// Queries per block of [`attention_paid`]: 64 was the best of 32 to 512 on a CPU.
const PAID_BLOCK: i64 = 64;

fn paid_by_blocks(chunk: &Chunk<'_>, keys_bgcd: &Tensor, lse_bhn: &Tensor, causal: bool) -> Tensor {
    let (b, h, n, d) = chunk.q_bhnd.size4().unwrap_or_default();
    let (groups, slots) = (keys_bgcd.size()[1], keys_bgcd.size()[2]);
    let per_group = h / groups;
    let kind = lse_bhn.kind();
    let keys_t = keys_bgcd.to_kind(kind).transpose(-1, -2);
    let paid = Tensor::zeros([b, groups, slots], (kind, lse_bhn.device()));
    for start in (0..n).step_by(PAID_BLOCK as usize) {
        let len = PAID_BLOCK.min(n - start);
        // A causal block sees the keys up to its own last query only.
        let width = if causal { start + len } else { slots };
        let q = chunk.q_bhnd.narrow(2, start, len).to_kind(kind).reshape([b, groups, per_group * len, d]);
        let lse = lse_bhn.narrow(2, start, len).reshape([b, groups, per_group * len, 1]);
        let mut weight = (q * chunk.scale).matmul(&keys_t.narrow(3, 0, width)).subtract_(&lse).exp_();
        if causal {
            weight = weight.view([b, groups, per_group, len, width]).tril(start).view([b, groups, per_group * len, width]);
        }
        let mut target = paid.narrow(2, 0, width);
        let _ = target.g_add_(&weight.sum_dim_intlist(&[2i64][..], false, kind));
    }
    paid / per_group as f64
}

fn num_kv_heads(chunk: &Chunk<'_>) -> i64 {
    chunk.k_bgnd.size()[1]
}

/// Folds the query heads of a KV head into the query axis: `(B, H, n, D)` to `(B, G, R·n, D)`, no copy of K or V needed.
fn fold(x_bhnd: &Tensor, groups: i64) -> Tensor {
    let s = x_bhnd.size();
    x_bhnd.reshape([s[0], groups, s[1] / groups * s[2], s[3]])
}

fn fold_lse(lse_bhn: &Tensor, groups: i64) -> Tensor {
    let s = lse_bhn.size();
    lse_bhn.reshape([s[0], groups, s[1] / groups * s[2]])
}

fn unfold(part: &Attended, like_bhnd: &Tensor) -> Attended {
    let s = like_bhnd.size();
    Attended { out_bhnd: part.out_bhnd.reshape(&s[..]), lse_bhn: part.lse_bhn.reshape(&s[..3]) }
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

    #[test]
    fn two_parts_equal_plain_attention_forward_backward_and_in_sums() {
        for (n, past, h, g) in [(5, 7, 6, 2), (1, 3, 4, 4), (70, 9, 8, 1), (4, 0, 2, 2)] {
            let (b, d, scale) = (2, 8, 0.3);
            let q = Tensor::randn([b, h, n, d], OPTS).set_requires_grad(true);
            let k = Tensor::randn([b, g, past + n, d], OPTS).set_requires_grad(true);
            let v = Tensor::randn([b, g, past + n, d], OPTS).set_requires_grad(true);
            let dout = Tensor::randn([b, h, n, d], OPTS);
            let (expected, weights) = naive(&q, &k, &v, scale);
            (&expected * &dout).sum(Kind::Double).backward();

            let (q0, k0, v0) = (q.detach(), k.detach(), v.detach());
            let (ko, vo) = (k0.narrow(2, 0, past).contiguous(), v0.narrow(2, 0, past).contiguous());
            let (kn, vn) = (k0.narrow(2, past, n).contiguous(), v0.narrow(2, past, n).contiguous());
            let old = (past > 0).then_some(Past { k_bgpd: &ko, v_bgpd: &vo });
            let chunk = Chunk { q_bhnd: &q0, k_bgnd: &kn, v_bgnd: &vn, scale };
            let merged = attend(chunk, old);
            assert!(worst(&merged.out_bhnd, &expected) < 1e-13);

            let grads = attend_backward(&dout, chunk, old, &merged);
            let join =
                |old: Option<&Tensor>, new: &Tensor| old.map_or_else(|| new.shallow_clone(), |o| Tensor::cat(&[o, new], 2));
            let (dk_old, dv_old) = grads.past.as_ref().map_or((None, None), |(k, v)| (Some(k), Some(v)));
            assert!(worst(&grads.dq_bhnd, &q.grad()) < 1e-12);
            assert!(worst(&join(dk_old, &grads.dk_bgnd), &k.grad()) < 1e-12);
            assert!(worst(&join(dv_old, &grads.dv_bgnd), &v.grad()) < 1e-12);

            let paid = attention_paid(chunk, old, &merged.lse_bhn);
            let sums = weights.sum_dim_intlist(&[2i64][..], false, Kind::Double).view([b, g, h / g, past + n]);
            let mean = sums.mean_dim(&[2i64][..], false, Kind::Double);
            assert!(worst(&paid, &mean) < 1e-12);
        }
    }

    #[test]
    fn a_query_with_infinite_log_sum_exp_pays_nothing() {
        let q = Tensor::randn([1, 2, 3, 4], OPTS);
        let k = Tensor::randn([1, 1, 3, 4], OPTS);
        let chunk = Chunk { q_bhnd: &q, k_bgnd: &k, v_bgnd: &k, scale: 0.5 };
        let lse = attend(chunk, None).lse_bhn;
        let _ = lse.narrow(2, 1, 2).fill_(f64::INFINITY);
        let paid = attention_paid(chunk, None, &lse);
        assert!((paid.sum(Kind::Double).double_value(&[]) - 1.0).abs() < 1e-12);
    }
}
