//! One attention part with its log-sum-exp, by tensor operations on blocks of queries, for any device.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::chunk::{Attended, KvBlock, Qkv, ScoreRule, accumulation_kind};

/// So far below every score that nothing is left of its weight; not minus infinity, as a head may see nothing at all.
const HIDDEN: f64 = -1e30;

const BLOCK: i64 = 512;

/// Scores of a block of queries against all keys, `(B, G, R, m, P)`, in the accumulation kind, whatever is hidden of them.
pub(super) fn block_scores(block: &Tensor, k: &Tensor, rule: ScoreRule) -> Tensor {
    let (b, h, len, d) = block.size4().unwrap_or_default();
    let (g, p) = (k.size()[1], k.size()[2]);
    let kind = accumulation_kind(block.kind());
    let block = block.to_kind(kind).reshape([b, g, h / g * len, d]);
    let products = (block * rule.scale).matmul(&k.to_kind(kind).transpose(-1, -2));
    rule.capped(products).view([b, g, h / g, len, p])
}

/// Scores without those of keys that a query does not see.
pub(super) fn hidden(mut scores: Tensor, start: i64, part: &KvBlock, is_causal: bool) -> Tensor {
    let (b, g, _, len, p) = scores.size5().unwrap_or_default();
    if let Some(valid) = &part.valid {
        scores = scores.masked_fill(&valid.logical_not().view([b, g, 1, 1, p]), HIDDEN);
    }
    if let Some(visible_until) = &part.visible_until {
        let query = Tensor::arange_start(start, start + len, (Kind::Int64, scores.device())).view([-1, 1]);
        scores = scores.masked_fill(&visible_until.view([b, g, 1, 1, p]).le_tensor(&query), HIDDEN);
    }
    if is_causal {
        let later = Tensor::ones([len, p], (Kind::Bool, scores.device())).tril(start).logical_not();
        scores = scores.masked_fill(&later, f64::NEG_INFINITY);
    }
    scores
}

/// One part forward: `q (B, H, n, D)`, a part of `P > 0` slots; a causal part has `P = n`.
pub(super) fn forward(q: &Tensor, part: &KvBlock, is_causal: bool, rule: ScoreRule) -> Attended {
    let (b, h, n, d) = q.size4().unwrap_or_default();
    let kind = accumulation_kind(q.kind());
    let (mut outs, mut lses) = (Vec::new(), Vec::new());
    let KvBlock { k, v, .. } = in_kind(part, kind);
    let v = v.unsqueeze(2);
    for start in (0..n).step_by(BLOCK as usize) {
        let len = BLOCK.min(n - start);
        let scores = hidden(block_scores(&q.narrow(2, start, len), &k, rule), start, part, is_causal);
        let lse = scores.logsumexp(&[-1i64][..], false);
        let weight = (scores - lse.unsqueeze(-1)).exp();
        let out = weight.matmul(&v);
        outs.push(out.reshape([b, h, len, d]).to_kind(q.kind()));
        lses.push(lse.reshape([b, h, len]));
    }
    Attended { out_bhnd: Tensor::cat(&outs, 2), lse_bhn: Tensor::cat(&lses, 2) }
}

/// Goes back through [`forward`] from the merged output and log-sum-exp: gradients of the queries, and of the part in the accumulation kind.
pub(super) fn backward(dout: &Tensor, chunk: &Qkv, past: Option<&KvBlock>, merged: &Attended) -> (Tensor, KvBlock) {
    let (part, q) = (past.unwrap_or(&chunk.own), &chunk.q_bhnd);
    let (b, h, n, d) = q.size4().unwrap_or_default();
    let (g, kind) = (part.k.size()[1], accumulation_kind(q.kind()));
    let part = &in_kind(part, kind);
    let (mut dk, mut dv) = (part.k.zeros_like(), part.v.zeros_like());
    let mut dqs = Vec::new();
    for start in (0..n).step_by(BLOCK as usize) {
        let len = BLOCK.min(n - start);
        let ScoreGradients { weight, dscore, slope } =
            score_gradients(start..start + len, dout, chunk, part, past.is_none(), merged);
        let dscore = dscore * chunk.rule.scale;
        let dscore = slope.map_or_else(|| dscore.shallow_clone(), |slope| &dscore * slope);
        let flat = |x: &Tensor| x.reshape([b, g, h / g * len, -1]);
        let grouped = |x: &Tensor| flat(&x.narrow(2, start, len).to_kind(kind));
        dk += flat(&dscore).transpose(-1, -2).matmul(&grouped(q));
        dv += flat(&weight).transpose(-1, -2).matmul(&grouped(dout));
        dqs.push(flat(&dscore).matmul(&part.k).reshape([b, h, len, d]).to_kind(q.kind()));
    }
    (Tensor::cat(&dqs, 2), KvBlock::of_planes([dk, dv]))
}

/// A part in the kind in which its blocks are computed.
fn in_kind(part: &KvBlock, kind: Kind) -> KvBlock {
    KvBlock { k: part.k.to_kind(kind), v: part.v.to_kind(kind), ..part.clone() }
}

/// The sum over a chunk's queries, and over the query heads of each KV head, of the squared gradient of a past key's score: the empirical
/// Fisher information of the scores.
///
/// # Shapes
/// `dout (B, H, n, D)`, a part of `P > 0` slots; `(B, G, P)` out, in the accumulation kind.
pub fn squared_score_gradients(dout: &Tensor, chunk: &Qkv, past: &KvBlock, merged: &Attended) -> Tensor {
    let (n, past) = (chunk.num_tokens(), &in_kind(past, accumulation_kind(dout.kind())));
    let blocks = (0..n).step_by(BLOCK as usize).map(|start| {
        let ScoreGradients { dscore, .. } = score_gradients(start..n.min(start + BLOCK), dout, chunk, past, false, merged);
        dscore.square().sum_dim_intlist(&[2i64, 3][..], false, dscore.kind())
    });
    blocks.reduce(|total, block| total + block).unwrap_or_else(|| past.k.select(3, 0).zeros_like())
}

/// The attention weights of some queries of a chunk, and what comes of the gradient of their outputs, all `(B, G, R, m, P)`.
struct ScoreGradients {
    weight: Tensor,
    /// The gradient of the scores that the softmax sees.
    dscore: Tensor,
    /// The derivative of these by the scores before they are capped, where they are.
    slope: Option<Tensor>,
}

/// What [`backward`] makes of some queries and a part of the keys, which is in the accumulation kind, and whether it is causal.
fn score_gradients(
    queries: Range<i64>,
    dout: &Tensor,
    chunk: &Qkv,
    part: &KvBlock,
    is_causal: bool,
    merged: &Attended,
) -> ScoreGradients {
    let (q, rule) = (&chunk.q_bhnd, chunk.rule);
    let (start, len) = (queries.start, queries.end - queries.start);
    let (b, h, ..) = q.size4().unwrap_or_default();
    let (g, kind) = (part.k.size()[1], accumulation_kind(q.kind()));
    let grouped = |x: &Tensor| x.narrow(2, start, len).to_kind(kind).reshape([b, g, h / g, len, -1]);
    let lse = merged.lse_bhn.narrow(2, start, len).reshape([b, g, h / g, len, 1]);
    let scores = block_scores(&q.narrow(2, start, len), &part.k, rule);
    // The derivative of c · tanh(s / c) is 1 − tanh²(s / c).
    let slope = rule.soft_cap.map(|cap| 1.0 - (&scores / cap).square());
    let weight = (hidden(scores, start, part, is_causal) - lse).exp();
    let (go, out) = (grouped(dout), grouped(&merged.out_bhnd));
    let delta = (&go * out).sum_dim_intlist(&[-1i64][..], true, kind);
    let dweight = go.matmul(&part.v.unsqueeze(2).transpose(-1, -2));
    ScoreGradients { dscore: &weight * (dweight - delta), weight, slope }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// libtorch's own kernel for the CPU: output, log-sum-exp and gradients.
    fn of_libtorch(dout: &Tensor, part: &Qkv, is_causal: bool) -> (Attended, [Tensor; 3]) {
        let Qkv { q_bhnd: q, own: KvBlock { k, v, .. }, rule: ScoreRule { scale, .. }, .. } = part;
        let scale = *scale;
        let none = None::<&Tensor>;
        let (out, lse) = Tensor::internal_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, none, scale);
        let (dq, dk, dv) = Tensor::internal_scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, &out, &lse, 0.0, is_causal, none, scale,
        );
        (Attended { out_bhnd: out, lse_bhn: lse }, [dq, dk, dv])
    }

    #[test]
    fn blocks_equal_another_kernel_forward_and_backward() {
        let opts = (Kind::Double, Device::Cpu);
        for (n, p, g, is_causal) in [(6, 6, 2, true), (5, 9, 2, false), (600, 600, 2, true), (600, 9, 4, false)] {
            let (q, dout) = (Tensor::randn([2, 4, n, 8], opts), Tensor::randn([2, 4, n, 8], opts));
            let (k, v) = (Tensor::randn([2, g, p, 8], opts), Tensor::randn([2, g, p, 8], opts));
            let part = Qkv::new(&q, &k, &v, ScoreRule::scaled(0.4));
            let (expected, gradients) = of_libtorch(&dout, &part, is_causal);
            let blocks = forward(&q, &part.own, is_causal, part.rule);
            assert!(blocks.out_bhnd.allclose(&expected.out_bhnd, 0.0, 1e-12, false));
            assert!(blocks.lse_bhn.allclose(&expected.lse_bhn, 1e-12, 1e-12, false));
            let (dq, own) = backward(&dout, &part, (!is_causal).then_some(&part.own), &expected);
            for (ours, expected) in [dq, own.k, own.v].iter().zip(&gradients) {
                assert!(ours.allclose(expected, 0.0, 1e-11, false));
            }
        }
    }

    /// Entries in few bits are computed with as if they had many, so that only what comes out is rounded.
    #[test]
    fn entries_in_bf16_give_what_the_same_numbers_give_in_f32() {
        let opts = (Kind::Float, Device::Cpu);
        let [q, k, v, dout] = [4, 2, 2, 4].map(|heads| Tensor::randn([2, heads, 7, 8], opts).to_kind(Kind::BFloat16));
        let wide = |x: &Tensor| x.to_kind(Kind::Float);
        let rule = ScoreRule::scaled(0.4);
        for is_causal in [true, false] {
            let (few, many) = (Qkv::new(&q, &k, &v, rule), Qkv::new(&wide(&q), &wide(&k), &wide(&v), rule));
            let (found, expected) = (forward(&q, &few.own, is_causal, rule), forward(&wide(&q), &many.own, is_causal, rule));
            let rounded = expected.out_bhnd.to_kind(Kind::BFloat16);
            assert!(found.out_bhnd.equal(&rounded) && found.lse_bhn.equal(&expected.lse_bhn), "{is_causal}");
            let merged = |out_bhnd: Tensor| Attended { out_bhnd, lse_bhn: expected.lse_bhn.shallow_clone() };
            let (few_past, many_past) = ((!is_causal).then_some(&few.own), (!is_causal).then_some(&many.own));
            let (dq, own) = backward(&dout, &few, few_past, &merged(rounded.shallow_clone()));
            let (dq_wide, own_wide) = backward(&wide(&dout), &many, many_past, &merged(wide(&rounded)));
            assert!(
                dq.equal(&dq_wide.to_kind(Kind::BFloat16)) && own.k.equal(&own_wide.k) && own.v.equal(&own_wide.v),
                "{is_causal}"
            );
        }
    }

    #[test]
    fn slots_that_are_not_in_use_do_not_count() {
        let opts = (Kind::Double, Device::Cpu);
        let (q, k, v) = (Tensor::randn([1, 2, 5, 8], opts), Tensor::randn([1, 2, 7, 8], opts), Tensor::randn([1, 2, 7, 8], opts));
        let in_use = Tensor::from_slice(&[true, true, true, true, false, false, false]).view([1, 1, 7]).expand([1, 2, 7], false);
        let part = Qkv::new(&q, &k, &v, ScoreRule::scaled(0.4));
        let (whole, few) = (KvBlock { valid: Some(in_use), ..part.own.clone() }, part.own.narrow(0, 4));
        let masked = forward(&q, &whole, false, part.rule);
        let shorter = forward(&q, &few, false, part.rule);
        assert!(masked.out_bhnd.allclose(&shorter.out_bhnd, 0.0, 1e-13, false));
        assert!(masked.lse_bhn.allclose(&shorter.lse_bhn, 0.0, 1e-13, false));
        let dout = Tensor::randn([1, 2, 5, 8], opts);
        let (dq, KvBlock { k: dk, v: dv, .. }) = backward(&dout, &part, Some(&whole), &masked);
        let expected = backward(&dout, &part, Some(&few), &masked);
        for (ours, expected) in [(dq, expected.0), (dk.narrow(2, 0, 4), expected.1.k), (dv.narrow(2, 0, 4), expected.1.v)] {
            assert!(ours.allclose(&expected, 0.0, 1e-12, false));
        }
        for unused in [dk, dv].map(|d| d.narrow(2, 4, 3)) {
            assert_eq!(unused, unused.zeros_like());
        }
    }

    #[test]
    fn squared_gradients_of_scores_are_those_of_autograd_through_the_softmax() {
        let opts = (Kind::Double, Device::Cpu);
        for cap in [None, Some(1.5)] {
            let (q, dout) = (Tensor::randn([2, 4, 5, 8], opts), Tensor::randn([2, 4, 5, 8], opts));
            let (k, v) = (Tensor::randn([2, 2, 7, 8], opts), Tensor::randn([2, 2, 7, 8], opts));
            let rule = ScoreRule { soft_cap: cap, ..ScoreRule::scaled(0.4) };
            let past = KvBlock::new(&k, &v);
            let chunk = Qkv::new(&q, &k.narrow(2, 0, 5), &v.narrow(2, 0, 5), rule);
            let twice = |x: &Tensor| x.repeat_interleave_self_int(2, 1, None);
            let products = q.matmul(&twice(&k).transpose(-1, -2)) * 0.4;
            let scores =
                cap.map_or_else(|| products.shallow_clone(), |cap| (&products / cap).tanh() * cap).set_requires_grad(true);
            let out = scores.softmax(-1, Kind::Double).matmul(&twice(&v));
            let gradient = Tensor::run_backward(&[(&out * &dout).sum(Kind::Double)], &[&scores], false, false).remove(0);
            let expected = gradient
                .square()
                .sum_dim_intlist(&[2i64][..], false, Kind::Double)
                .view([2, 2, 2, 7])
                .sum_dim_intlist(&[2i64][..], false, Kind::Double);
            let merged = Attended { out_bhnd: out.detach(), lse_bhn: scores.detach().logsumexp(&[-1i64][..], false) };
            let found = squared_score_gradients(&dout, &chunk, &past, &merged);
            assert!(found.allclose(&expected, 1e-11, 1e-13, false), "{cap:?}");
        }
    }
}
