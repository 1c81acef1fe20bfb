//! Attention and its backward on one backend, whichever it is.

use tch::Tensor;

use super::backend::Backend;
use super::chunk::{Attended, AttentionGrads, KvBlock, Qkv, Queries};
use super::{joined, merged};
use crate::native;

/// Computes [`attend_and_sum`](super::attend_and_sum) with the kernels of `backend`.
pub(super) fn attend_by(backend: Backend, chunk: &Qkv, past: &[KvBlock], asked: Option<Queries>) -> (Attended, Option<Tensor>) {
    match (backend, &chunk.joined) {
        (Backend::Own, _) => {
            let first = asked.map(|queries| queries.first(chunk.num_tokens()));
            let (out_bhnd, lse_bhn, sums) = native::attend(&chunk.q_bhnd, &all_parts(chunk, past), chunk.rule, first);
            (Attended { out_bhnd, lse_bhn }, sums.map(|sums| sums / chunk.per_group()))
        }
        (Backend::Joined(vendor), Some(keys)) if chunk.rule.soft_cap.is_none() => (joined::attend(vendor, chunk, keys), None),
        (Backend::Joined(vendor) | Backend::Parts(vendor), _) => (merged::attend(Some(vendor), chunk, past), None),
        (Backend::Blocks, _) => (merged::attend(None, chunk, past), None),
    }
}

/// Computes [`attend_backward`](super::attend_backward) with the kernels of `backend`.
pub(super) fn attend_backward_by(
    backend: Backend,
    dout: &Tensor,
    chunk: &Qkv,
    past: &[KvBlock],
    attended: &Attended,
) -> AttentionGrads {
    match (backend, &chunk.joined) {
        (Backend::Own, _) => {
            let (Attended { out_bhnd, lse_bhn }, parts) = (attended, all_parts(chunk, past));
            let (dq_bhnd, mut past) = native::attend_backward(dout, &chunk.q_bhnd, &parts, out_bhnd, lse_bhn, chunk.rule);
            let own = past.pop().unwrap_or_else(|| KvBlock::of_planes([]));
            AttentionGrads { dq_bhnd, own, past }
        }
        (Backend::Joined(vendor), Some(keys)) if chunk.rule.soft_cap.is_none() => {
            joined::attend_backward(vendor, dout, chunk, keys, attended)
        }
        (Backend::Joined(vendor) | Backend::Parts(vendor), _) => {
            merged::attend_backward(Some(vendor), dout, chunk, past, attended)
        }
        (Backend::Blocks, _) => merged::attend_backward(None, dout, chunk, past, attended),
    }
}

/// Keys and values part by part, the chunk's own last.
pub(super) fn all_parts<'a>(chunk: &'a Qkv, past: &'a [KvBlock]) -> Vec<&'a KvBlock> {
    past.iter().chain([&chunk.own]).collect()
}
