//! Attention and its backward on one backend, whichever it is.

use tch::Tensor;

use super::backend::Backend;
use super::chunk::{Attended, AttentionGrads, Chunk, KvPage, Queries};
use super::part::PartKernel;
use super::{joined, merged};
use crate::native;

/// As [`attend_and_sum`](super::attend_and_sum), on `backend`.
pub(super) fn attend_by(
    backend: Backend,
    chunk: Chunk<'_>,
    past: &[KvPage<'_>],
    asked: Option<Queries>,
) -> (Attended, Option<Tensor>) {
    match (backend, chunk.joined_bgcd) {
        (Backend::Own, _) => {
            let first = asked.map(|queries| queries.first(chunk.qkv.q_bhnd.size()[2]));
            let (out_bhnd, lse_bhn, sums) =
                native::attend(chunk.qkv.q_bhnd, &all_parts(&chunk, past), chunk.qkv.rule.scoring(), first);
            (Attended { out_bhnd, lse_bhn }, sums.map(|sums| sums / chunk.per_group()))
        }
        (Backend::Joined(vendor), Some(keys)) if chunk.qkv.rule.soft_cap.is_none() => (joined::attend(vendor, chunk, keys), None),
        (Backend::Joined(vendor), _) => (merged::attend(PartKernel::TorchKernel(vendor), chunk, past), None),
        (Backend::Parts(kernel), _) => (merged::attend(kernel, chunk, past), None),
    }
}

/// As [`attend_backward`](super::attend_backward), on `backend`.
pub(super) fn attend_backward_by(
    backend: Backend,
    dout: &Tensor,
    chunk: Chunk<'_>,
    past: &[KvPage<'_>],
    attended: &Attended,
) -> AttentionGrads {
    match (backend, chunk.joined_bgcd) {
        (Backend::Own, _) => {
            let Attended { out_bhnd, lse_bhn } = attended;
            let (parts, scoring) = (all_parts(&chunk, past), chunk.qkv.rule.scoring());
            let grads = native::attend_backward(dout, chunk.qkv.q_bhnd, &parts, out_bhnd, lse_bhn, scoring);
            let mut past: Vec<(Tensor, Tensor)> = grads.dk_bgpd.into_iter().zip(grads.dv_bgpd).collect();
            let (dk_bgnd, dv_bgnd) = past.pop().unwrap_or_default();
            AttentionGrads { dq_bhnd: grads.dq_bhnd, dk_bgnd, dv_bgnd, past }
        }
        (Backend::Joined(vendor), Some(keys)) if chunk.qkv.rule.soft_cap.is_none() => {
            joined::attend_backward(vendor, dout, chunk, keys, attended)
        }
        (Backend::Joined(vendor), _) => merged::attend_backward(PartKernel::TorchKernel(vendor), dout, chunk, past, attended),
        (Backend::Parts(kernel), _) => merged::attend_backward(kernel, dout, chunk, past, attended),
    }
}

/// Keys and values part by part, the chunk's own last.
pub(super) fn all_parts<'a>(chunk: &Chunk<'a>, past: &[KvPage<'a>]) -> Vec<KvPage<'a>> {
    past.iter().copied().chain([chunk.own()]).collect()
}
