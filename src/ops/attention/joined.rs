//! Past and chunk at once, where their keys lie side by side: the chunk's queries are those of the last keys, so a causal mask that ends
//! at the last key of the last query is all that they need. Nothing is merged.

use tch::Tensor;

use super::chunk::{Attended, AttentionGrads, KvBlock, Qkv};
use crate::native::cuda::{TorchKernel, TorchKernelMask, vendor_attend, vendor_attend_backward};
use crate::native::or_panic;

/// All forward.
///
/// # Shapes
/// `joined (B, G, P + n, D)` each.
pub(super) fn attend(vendor: TorchKernel, chunk: &Qkv, joined: &KvBlock) -> Attended {
    let mask = TorchKernelMask::CausalFromEnd;
    let attended = vendor_attend(vendor, &chunk.q_bhnd, &joined.k, &joined.v, mask, chunk.rule.scale);
    let (out_bhnd, lse_bhn) = or_panic(attended);
    Attended { out_bhnd, lse_bhn }
}

/// All backward; what belongs to the past comes as one part.
///
/// # Shapes
/// `dout_bhnd (B, H, n, D)`, `joined` as in [`attend`].
pub(super) fn attend_backward(
    vendor: TorchKernel,
    dout_bhnd: &Tensor,
    chunk: &Qkv,
    KvBlock { k, v, .. }: &KvBlock,
    attended: &Attended,
) -> AttentionGrads {
    let of_forward = [&attended.out_bhnd, &attended.lse_bhn];
    let grads = vendor_attend_backward(
        vendor,
        dout_bhnd,
        [&chunk.q_bhnd, k, v],
        of_forward,
        TorchKernelMask::CausalFromEnd,
        chunk.rule.scale,
    );
    let (dq_bhnd, dk, dv) = or_panic(grads);
    let (both, own) = (KvBlock::of_planes([dk, dv]), chunk.num_tokens());
    let past = both.slots() - own;
    let of_past = (past > 0).then(|| both.narrow(0, past));
    AttentionGrads { dq_bhnd, own: both.narrow(past, own), past: of_past.into_iter().collect() }
}
