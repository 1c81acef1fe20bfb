//! One attention part with its log-sum-exp: the vendor's CPU kernel, and blockwise tensor operations on any other device.

use tch::{Device, Kind, Tensor};

use super::attention::{Attended, Chunk, accumulation_kind};

/// One part forward.
///
/// # Shapes
/// `q (B, H, n, D)`, `k`, `v (B, G, P, D)` with `P > 0`; a causal part has `P = n`.
pub(super) fn forward(q: &Tensor, k: &Tensor, v: &Tensor, causal: bool, scale: f64) -> Attended {
    if q.device() != Device::Cpu {
        return blocks_forward(q, k, v, causal, scale);
    }
    let mask: Option<&Tensor> = None;
    let (out, lse) = Tensor::internal_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, mask, scale);
    // The kernel lays the log-sum-exp out as (B, n, H): the rest of us wants it dense.
    Attended { out_bhnd: out.contiguous(), lse_bhn: lse.contiguous() }
}

/// One part backward, from the merged output and log-sum-exp: `(dq, dk, dv)`.
///
/// # Shapes
/// As in [`forward`]; `dk`, `dv` have the KV heads of `k`, in the accumulation kind.
pub(super) fn backward(dout: &Tensor, part: Chunk<'_>, merged: &Attended, causal: bool) -> (Tensor, Tensor, Tensor) {
    if part.q_bhnd.device() != Device::Cpu {
        return blocks_backward(dout, part, merged, causal);
    }
    // CPUs without matrix units for bf16 emulate its products, at a tenth of the speed of f32.
    let kind = accumulation_kind(part.q_bhnd.kind());
    let (q, k, v) = (part.q_bhnd.to_kind(kind), part.k_bgnd.to_kind(kind), part.v_bgnd.to_kind(kind));
    let (dout, out) = (dout.to_kind(kind), merged.out_bhnd.to_kind(kind));
    let mask: Option<&Tensor> = None;
    let (dq, dk, dv) = Tensor::internal_scaled_dot_product_flash_attention_for_cpu_backward(
        &dout,
        &q,
        &k,
        &v,
        &out,
        &merged.lse_bhn,
        0.0,
        causal,
        mask,
        part.scale,
    );
    (dq.to_kind(part.q_bhnd.kind()), dk, dv)
}

/// Queries per block of the blockwise form.
const BLOCK: i64 = 512;

/// Scores of a block of queries against all keys, `(B, G, R, m, P)`, in the accumulation kind.
fn block_scores(q: &Tensor, k: &Tensor, rows: (i64, i64), causal: bool, scale: f64) -> Tensor {
    let (start, len) = rows;
    let (b, h, _, d) = q.size4().unwrap_or_default();
    let (g, p) = (k.size()[1], k.size()[2]);
    let kind = accumulation_kind(q.kind());
    let block = q.narrow(2, start, len).to_kind(kind).reshape([b, g, h / g * len, d]);
    let scores = (block * scale).matmul(&k.to_kind(kind).transpose(-1, -2)).view([b, g, h / g, len, p]);
    if !causal {
        return scores;
    }
    let hidden = Tensor::ones([len, p], (Kind::Bool, q.device())).tril(start).logical_not();
    scores.masked_fill(&hidden, f64::NEG_INFINITY)
}

fn blocks_forward(q: &Tensor, k: &Tensor, v: &Tensor, causal: bool, scale: f64) -> Attended {
    let (b, h, n, d) = q.size4().unwrap_or_default();
    let kind = accumulation_kind(q.kind());
    let (mut outs, mut lses) = (Vec::new(), Vec::new());
    for start in (0..n).step_by(BLOCK as usize) {
        let len = BLOCK.min(n - start);
        let scores = block_scores(q, k, (start, len), causal, scale);
        let lse = scores.logsumexp(&[-1i64][..], false);
        let weight = (scores - lse.unsqueeze(-1)).exp();
        let out = weight.matmul(&v.to_kind(kind).unsqueeze(2));
        outs.push(out.reshape([b, h, len, d]).to_kind(q.kind()));
        lses.push(lse.reshape([b, h, len]));
    }
    Attended { out_bhnd: Tensor::cat(&outs, 2), lse_bhn: Tensor::cat(&lses, 2) }
}

fn blocks_backward(dout: &Tensor, part: Chunk<'_>, merged: &Attended, causal: bool) -> (Tensor, Tensor, Tensor) {
    let (q, k, v) = (part.q_bhnd, part.k_bgnd, part.v_bgnd);
    let (b, h, n, d) = q.size4().unwrap_or_default();
    let (g, p) = (k.size()[1], k.size()[2]);
    let kind = accumulation_kind(q.kind());
    let (k, v) = (k.to_kind(kind), v.to_kind(kind));
    let (mut dk, mut dv) = (k.zeros_like(), v.zeros_like());
    let mut dqs = Vec::new();
    for start in (0..n).step_by(BLOCK as usize) {
        let len = BLOCK.min(n - start);
        let grouped = |x: &Tensor| x.narrow(2, start, len).to_kind(kind).reshape([b, g, h / g, len, -1]);
        let lse = merged.lse_bhn.narrow(2, start, len).reshape([b, g, h / g, len, 1]);
        let weight = (block_scores(q, &k, (start, len), causal, part.scale) - lse).exp();
        let (go, out) = (grouped(dout), grouped(&merged.out_bhnd));
        let delta = (&go * out).sum_dim_intlist(&[-1i64][..], true, kind);
        let dweight = go.matmul(&v.unsqueeze(2).transpose(-1, -2));
        let dscore = &weight * (dweight - delta) * part.scale;
        let flat = |x: &Tensor| x.reshape([b, g, h / g * len, -1]);
        dk += flat(&dscore).transpose(-1, -2).matmul(&flat(&grouped(q)));
        dv += flat(&weight).transpose(-1, -2).matmul(&flat(&go));
        dqs.push(flat(&dscore).matmul(&k).reshape([b, h, len, d]).to_kind(q.kind()));
    }
    debug_assert_eq!(dk.size(), [b, g, p, d]);
    (Tensor::cat(&dqs, 2), dk, dv)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_blockwise_form_equals_the_vendor_kernel() {
        let opts = (Kind::Double, Device::Cpu);
        for (n, p, causal) in [(6, 6, true), (5, 9, false), (600, 600, true)] {
            let (q, dout) = (Tensor::randn([2, 4, n, 8], opts), Tensor::randn([2, 4, n, 8], opts));
            let (k, v) = (Tensor::randn([2, 2, p, 8], opts), Tensor::randn([2, 2, p, 8], opts));
            let (kernel, blocks) = (forward(&q, &k, &v, causal, 0.4), blocks_forward(&q, &k, &v, causal, 0.4));
            assert!(kernel.out_bhnd.allclose(&blocks.out_bhnd, 0.0, 1e-12, false));
            assert!(kernel.lse_bhn.allclose(&blocks.lse_bhn, 0.0, 1e-12, false));
            let part = Chunk { q_bhnd: &q, k_bgnd: &k, v_bgnd: &v, scale: 0.4 };
            let (a, b) = (backward(&dout, part, &kernel, causal), blocks_backward(&dout, part, &kernel, causal));
            for (a, b) in [(a.0, b.0), (a.1, b.1), (a.2, b.2)] {
                assert!(a.allclose(&b, 0.0, 1e-11, false));
            }
        }
    }
}
