//! Past and chunk as parts that are merged by their log-sum-exps (Dao 2023, arXiv 2307.08691, section 3): exact, forward and backward.
//!
//! So is the sink logit of a head: one more score in its softmax, which is learned and has no value, so that a query may give weight to nothing
//! (Miller 2023, "Attention is off by one"; gpt-oss, arXiv 2508.10925, section 2.2, calls it a sink). Whatever the kernel, it takes a share of
//! what was attended without it. The backward of all other scores is that of the kernel, given the output and the log-sum-exp that it is part of.

use tch::{Kind, Tensor};

use super::blocks;
use super::chunk::{Attended, AttentionGrads, KvBlock, Qkv, ScoreRule, accumulation_kind};
use crate::native::cuda::{TorchKernel, TorchKernelMask, vendor_attend, vendor_attend_backward};
use crate::native::or_panic;

/// `kernel` attends to each part, where nothing is capped or left out ([`Qkv::is_plain`]); without one, tensor operations in blocks of queries do.
pub(super) fn attend(kernel: Option<TorchKernel>, chunk: &Qkv, past: &[KvBlock]) -> Attended {
    let own = part_forward(kernel, &chunk.q_bhnd, &chunk.own, true, chunk.rule);
    past.iter().fold(own, |merged, past| {
        let old = part_forward(kernel, &chunk.q_bhnd, past, false, chunk.rule);
        merge(&old, &merged)
    })
}

/// Each part's backward, with the *merged* output and log-sum-exp, so that the parts add up.
pub(super) fn attend_backward(
    kernel: Option<TorchKernel>,
    dout_bhnd: &Tensor,
    chunk: &Qkv,
    past: &[KvBlock],
    merged: &Attended,
) -> AttentionGrads {
    let (dq_bhnd, own) = part_backward(kernel, dout_bhnd, chunk, None, merged);
    let kind = dq_bhnd.kind();
    // Summed in more bits, and rounded once.
    let mut total = if past.is_empty() { dq_bhnd } else { dq_bhnd.to_kind(accumulation_kind(kind)) };
    let mut grads = Vec::with_capacity(past.len());
    for past in past {
        let (dq, of_past) = part_backward(kernel, dout_bhnd, chunk, Some(past), merged);
        total += dq;
        grads.push(of_past);
    }
    AttentionGrads { dq_bhnd: total.to_kind(kind), own, past: grads }
}

fn merge(a: &Attended, b: &Attended) -> Attended {
    let lse_bhn = a.lse_bhn.logaddexp(&b.lse_bhn);
    #[cfg(test)]
    if crate::units::sabotage::is_active(crate::units::sabotage::Sabotage::MergeMissing) {
        return Attended { out_bhnd: &a.out_bhnd + &b.out_bhnd, lse_bhn };
    }
    let weight = |part: &Attended| (&part.lse_bhn - &lse_bhn).exp().unsqueeze(-1);
    // The weights are of f32 at least, and so are the products.
    let out = &a.out_bhnd * weight(a) + &b.out_bhnd * weight(b);
    Attended { out_bhnd: out.to_kind(a.out_bhnd.kind()), lse_bhn }
}

/// The query heads of a KV head in one row, where all see the same: so no kernel copies keys for them. `(B, H, …)` in,
/// `(B, G, H / G · n, …)` out.
fn folded(x: &Tensor, groups: i64) -> Tensor {
    let mut size = x.size();
    (size[2], size[1]) = (size[1] / groups * size[2], groups);
    x.reshape(&size[..])
}

fn mask_of_part(is_causal: bool) -> TorchKernelMask {
    if is_causal { TorchKernelMask::Causal } else { TorchKernelMask::All }
}

/// One part forward, of queries `(B, H, n, D)`; a causal part has as many keys.
fn part_forward(kernel: Option<TorchKernel>, q_bhnd: &Tensor, part: &KvBlock, is_causal: bool, rule: ScoreRule) -> Attended {
    let Some(vendor) = kernel else { return blocks::forward(q_bhnd, part, is_causal, rule) };
    let size = q_bhnd.size();
    let q = if is_causal { q_bhnd } else { &folded(q_bhnd, part.k.size()[1]) };
    let (out, lse) = or_panic(vendor_attend(vendor, q, &part.k, &part.v, mask_of_part(is_causal), rule.scale));
    Attended { out_bhnd: out.reshape(&size[..]), lse_bhn: lse.reshape(&size[..3]) }
}

/// One part backward, of the past or the chunk's own, from the merged output and log-sum-exp: the gradients of the queries, and of the part.
fn part_backward(
    kernel: Option<TorchKernel>,
    dout_bhnd: &Tensor,
    chunk: &Qkv,
    past: Option<&KvBlock>,
    merged: &Attended,
) -> (Tensor, KvBlock) {
    let Some(vendor) = kernel else { return blocks::backward(dout_bhnd, chunk, past, merged) };
    let (part, is_causal) = (past.unwrap_or(&chunk.own), past.is_none());
    let inputs = [dout_bhnd, &chunk.q_bhnd, &merged.out_bhnd, &merged.lse_bhn];
    let groups = part.k.size()[1];
    let [dout, q, out, lse] = inputs.map(|x| if is_causal { x.shallow_clone() } else { folded(x, groups) });
    let (keys, mask) = ([&q, &part.k, &part.v], mask_of_part(is_causal));
    let (dq, dk, dv) = or_panic(vendor_attend_backward(vendor, &dout, keys, [&out, &lse], mask, chunk.rule.scale));
    (dq.reshape(&chunk.q_bhnd.size()[..]), KvBlock::of_planes([dk, dv]))
}

/// The sink logit of each head, shaped like the log-sum-exp of its queries.
fn beside(sink_logit_h: &Tensor, kind: Kind) -> Tensor {
    sink_logit_h.to_kind(kind).view([1, -1, 1])
}

/// What was attended without an attention sink, with it: `sink_logit_h (H)`.
pub(super) fn with_sink(attended: Attended, sink_logit_h: &Tensor) -> Attended {
    let lse_bhn = attended.lse_bhn.logaddexp(&beside(sink_logit_h, attended.lse_bhn.kind()));
    let kept_bhn = (attended.lse_bhn - &lse_bhn).exp_();
    let mut out_bhnd = attended.out_bhnd;
    Attended { out_bhnd: out_bhnd.g_mul_(&kept_bhn.unsqueeze(-1)), lse_bhn }
}

/// The gradient `(H)` of the sink logit, in the accumulation kind, given what was attended with it.
pub fn sink_logit_backward(dout_bhnd: &Tensor, attended: &Attended, sink_logit_h: &Tensor) -> Tensor {
    let kind = accumulation_kind(dout_bhnd.kind());
    let weight_bhn = (beside(sink_logit_h, kind) - &attended.lse_bhn).exp_();
    let given_bhn = (dout_bhnd.to_kind(kind) * &attended.out_bhnd).sum_dim_intlist(&[-1i64][..], false, kind);
    -(weight_bhn * given_bhn).sum_dim_intlist(&[0i64, 2][..], false, kind)
}
