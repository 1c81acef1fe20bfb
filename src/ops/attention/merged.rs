//! Past and chunk as parts that are merged by their log-sum-exps (Dao 2023, arXiv 2307.08691, section 3): exact, forward and backward.

use tch::Tensor;

use super::chunk::{Attended, AttentionGrads, KvBlock, Qkv, accumulation_kind};
use super::part;
use crate::native::cuda::TorchKernel;

/// `kernel` serves the parts that it can serve, tensor operations the others.
pub(super) fn attend(kernel: Option<TorchKernel>, chunk: &Qkv, past: &[KvBlock]) -> Attended {
    let own = part::forward(kernel, &chunk.q_bhnd, &chunk.own, true, chunk.rule);
    past.iter().fold(own, |merged, past| {
        let old = part::forward(kernel, &chunk.q_bhnd, past, false, chunk.rule);
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
    let (dq_bhnd, own) = part::backward(kernel, dout_bhnd, chunk, None, merged);
    let kind = dq_bhnd.kind();
    // Summed in more bits, and rounded once.
    let mut total = if past.is_empty() { dq_bhnd } else { dq_bhnd.to_kind(accumulation_kind(kind)) };
    let mut grads = Vec::with_capacity(past.len());
    for past in past {
        let (dq, of_past) = part::backward(kernel, dout_bhnd, chunk, Some(past), merged);
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
