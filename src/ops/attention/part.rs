//! One part of the keys, with its log-sum-exp: in blocks, or by a kernel that comes with libtorch.

use tch::Tensor;

use super::blocks;
use super::chunk::{Attended, KvBlock, Qkv, ScoreRule};
use crate::native::cuda::{TorchKernel, TorchKernelMask, vendor_attend, vendor_attend_backward};
use crate::native::or_panic;

/// The kernel, if it serves what the queries see, and how.
fn serving(
    kernel: Option<TorchKernel>,
    part: &KvBlock,
    is_causal: bool,
    rule: ScoreRule,
) -> Option<(TorchKernel, TorchKernelMask)> {
    let mask = if is_causal { TorchKernelMask::Causal } else { TorchKernelMask::All };
    Some((kernel.filter(|_| rule.soft_cap.is_none() && !part.is_masked())?, mask))
}

/// The query heads of a KV head in one row, where all see the same: so no kernel copies keys for them.
///
/// # Shapes
/// `x (B, H, …)`; result `(B, G, H / G · n, …)`.
fn folded(x: &Tensor, groups: i64) -> Tensor {
    let mut size = x.size();
    (size[2], size[1]) = (size[1] / groups * size[2], groups);
    x.reshape(&size[..])
}

/// One part forward.
///
/// # Shapes
/// `q_bhnd (B, H, n, D)`; a causal part has as many keys.
pub(super) fn forward(
    kernel: Option<TorchKernel>,
    q_bhnd: &Tensor,
    part: &KvBlock,
    is_causal: bool,
    rule: ScoreRule,
) -> Attended {
    let Some((vendor, seen)) = serving(kernel, part, is_causal, rule) else {
        return blocks::forward(q_bhnd, part, is_causal, rule);
    };
    let size = q_bhnd.size();
    let q = if seen == TorchKernelMask::All { &folded(q_bhnd, part.k.size()[1]) } else { q_bhnd };
    let (out, lse) = or_panic(vendor_attend(vendor, q, &part.k, &part.v, seen, rule.scale));
    Attended { out_bhnd: out.reshape(&size[..]), lse_bhn: lse.reshape(&size[..3]) }
}

/// One part backward, a block of the past or the chunk's own, from the merged output and log-sum-exp: the gradients of the queries, and of
/// the part.
///
/// # Shapes
/// As in [`forward`].
pub(super) fn backward(
    kernel: Option<TorchKernel>,
    dout_bhnd: &Tensor,
    chunk: &Qkv,
    past: Option<&KvBlock>,
    merged: &Attended,
) -> (Tensor, KvBlock) {
    let part = past.unwrap_or(&chunk.own);
    let Some((vendor, seen)) = serving(kernel, part, past.is_none(), chunk.rule) else {
        return blocks::backward(dout_bhnd, chunk, past, merged);
    };
    let inputs = [dout_bhnd, &chunk.q_bhnd, &merged.out_bhnd, &merged.lse_bhn];
    let groups = part.k.size()[1];
    let [dout, q, out, lse] = inputs.map(|x| if seen == TorchKernelMask::All { folded(x, groups) } else { x.shallow_clone() });
    let grads = vendor_attend_backward(vendor, &dout, [&q, &part.k, &part.v], [&out, &lse], seen, chunk.rule.scale);
    let (dq, dk, dv) = or_panic(grads);
    (dq.reshape(&chunk.q_bhnd.size()[..]), KvBlock::of_planes([dk, dv]))
}
