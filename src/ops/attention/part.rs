//! One part of the keys, with its log-sum-exp: in blocks, or by a kernel that comes with libtorch.

use tch::Tensor;

use super::blocks;
use super::chunk::{Attended, Chunk, KvPage, Mask, Qkv};
use super::rule::ScoreRule;
use crate::native::cuda::{TorchKernel, TorchKernelMask, vendor_attend, vendor_attend_backward};
use crate::native::or_panic;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartKernel {
    /// Tensor operations on blocks of queries: for any device and kind, and the only one that leaves out slots and caps
    /// scores.
    Blocks,
    /// A kernel that comes with libtorch.
    TorchKernel(TorchKernel),
}

impl PartKernel {
    /// The kernel that comes with libtorch, if it serves what the queries see, and how.
    fn vendor(self, mask: Mask<'_>, rule: ScoreRule) -> Option<(TorchKernel, TorchKernelMask)> {
        match (self, mask) {
            _ if rule.soft_cap.is_some() => None,
            (Self::TorchKernel(vendor), Mask { is_causal, in_use_bgp: None, seen_until_bgp: None }) => {
                Some((vendor, if is_causal { TorchKernelMask::Causal } else { TorchKernelMask::All }))
            }
            _ => None,
        }
    }
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
pub(super) fn forward(kernel: PartKernel, q_bhnd: &Tensor, part: &KvPage<'_>, mask: Mask<'_>, rule: ScoreRule) -> Attended {
    let (k, v) = (part.k_bgpd, part.v_bgpd);
    let Some((vendor, seen)) = kernel.vendor(mask, rule) else { return blocks::forward(q_bhnd, k, v, mask, rule) };
    let size = q_bhnd.size();
    let q = if seen == TorchKernelMask::All { &folded(q_bhnd, k.size()[1]) } else { q_bhnd };
    let (out, lse) = or_panic(vendor_attend(vendor, q, k, v, seen, rule.scale));
    Attended { out_bhnd: out.reshape(&size[..]), lse_bhn: lse.reshape(&size[..3]) }
}

/// One part backward, from the merged output and log-sum-exp: `(dq, dk, dv)`.
///
/// # Shapes
/// As in [`forward`]; `dk`, `dv` as the part's keys.
pub(super) fn backward(
    kernel: PartKernel,
    dout_bhnd: &Tensor,
    chunk: &Chunk<'_>,
    (part, mask): (&KvPage<'_>, Mask<'_>),
    merged: &Attended,
) -> (Tensor, Tensor, Tensor) {
    let (k, v) = (part.k_bgpd, part.v_bgpd);
    let Some((vendor, seen)) = kernel.vendor(mask, chunk.qkv.rule) else {
        return blocks::backward(dout_bhnd, Qkv { k_bgnd: k, v_bgnd: v, ..chunk.qkv }, merged, mask);
    };
    let inputs = [dout_bhnd, chunk.qkv.q_bhnd, &merged.out_bhnd, &merged.lse_bhn];
    let groups = k.size()[1];
    let [dout, q, out, lse] = inputs.map(|x| if seen == TorchKernelMask::All { folded(x, groups) } else { x.shallow_clone() });
    let (dq, dk, dv) = or_panic(vendor_attend_backward(vendor, &dout, [&q, k, v], [&out, &lse], seen, chunk.qkv.rule.scale));
    (dq.reshape(&chunk.qkv.q_bhnd.size()[..]), dk, dv)
}
