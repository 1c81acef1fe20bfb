//! Attention of a chunk to the past and to itself, its backward, and the attention mass to each slot.
//!
//! Flash attention in the sense of Dao 2023 (arXiv 2307.08691): forward keeps the log-sum-exp, backward recomputes the weights. Whose
//! kernel it is, and whether past and chunk are seen at once or as parts that are merged, is the [`Backend`].

mod backend;
mod blocks;
mod calibrate;
mod chunk;
mod joined;
mod mass;
mod merged;
mod part;
mod rule;
#[cfg(test)]
mod tests;

use tch::{Kind, Tensor};

#[cfg(test)]
pub(crate) use backend::forced;
pub use backend::{AttendShape, Backend};
pub use calibrate::{Calibration, Timed, calibrate, calibrations, in_words, measure};
pub use chunk::{Attended, AttentionGrads, Chunk, KvPage, Qkv, Queries};
pub use mass::attention_mass;
pub use part::PartKernel;
pub use rule::ScoreRule;

use crate::native;

/// Attends a chunk to its past (all of it, part by part) and causally to itself.
///
/// # Shapes
/// As in [`Chunk`] and [`KvPage`].
pub fn attend(chunk: Chunk<'_>, past: &[KvPage<'_>]) -> Attended {
    attend_and_sum(chunk, past, None).0
}

/// As [`attend`], and where some queries are asked for, and the kernel makes it on the way, the attention mass of those queries, as in
/// [`attention_mass`].
pub fn attend_and_sum(chunk: Chunk<'_>, past: &[KvPage<'_>], asked: Option<Queries>) -> (Attended, Option<Tensor>) {
    attend_by(Backend::of(&chunk, past), chunk, past, asked)
}

fn attend_by(backend: Backend, chunk: Chunk<'_>, past: &[KvPage<'_>], asked: Option<Queries>) -> (Attended, Option<Tensor>) {
    match (backend, chunk.joined_bgcd) {
        (Backend::Own, _) => {
            let first = asked.map(|queries| queries.first(chunk.qkv.q_bhnd.size()[2]));
            let (out_bhnd, lse_bhn, sums) =
                native::attend(chunk.qkv.q_bhnd, &all_parts(&chunk, past), chunk.qkv.rule.scale, first);
            (Attended { out_bhnd, lse_bhn }, sums.map(|sums| sums / chunk.per_group()))
        }
        (Backend::Joined(vendor), Some(keys)) => (joined::attend(vendor, chunk, keys), None),
        (Backend::Joined(vendor), None) => (merged::attend(PartKernel::TorchKernel(vendor), chunk, past), None),
        (Backend::Parts(kernel), _) => (merged::attend(kernel, chunk, past), None),
    }
}

/// The backward of [`attend`].
///
/// # Shapes
/// `dout_bhnd (B, H, n, D)`; the rest as in [`AttentionGrads`].
pub fn attend_backward(dout_bhnd: &Tensor, chunk: Chunk<'_>, past: &[KvPage<'_>], merged: &Attended) -> AttentionGrads {
    attend_backward_by(Backend::of(&chunk, past), dout_bhnd, chunk, past, merged)
}

fn attend_backward_by(
    backend: Backend,
    dout: &Tensor,
    chunk: Chunk<'_>,
    past: &[KvPage<'_>],
    attended: &Attended,
) -> AttentionGrads {
    match (backend, chunk.joined_bgcd) {
        (Backend::Own, _) => {
            let out = (&attended.out_bhnd, &attended.lse_bhn);
            let grads = native::attend_backward(dout, chunk.qkv.q_bhnd, &all_parts(&chunk, past), out, chunk.qkv.rule.scale);
            let mut past: Vec<(Tensor, Tensor)> = grads.dk_bgpd.into_iter().zip(grads.dv_bgpd).collect();
            let (dk_bgnd, dv_bgnd) = past.pop().unwrap_or_default();
            AttentionGrads { dq_bhnd: grads.dq_bhnd, dk_bgnd, dv_bgnd, past }
        }
        (Backend::Joined(vendor), Some(keys)) => joined::attend_backward(vendor, dout, chunk, keys, attended),
        (Backend::Joined(vendor), None) => merged::attend_backward(PartKernel::TorchKernel(vendor), dout, chunk, past, attended),
        (Backend::Parts(kernel), _) => merged::attend_backward(kernel, dout, chunk, past, attended),
    }
}

/// Keys and values part by part, the chunk's own last.
fn all_parts<'a>(chunk: &Chunk<'a>, past: &[KvPage<'a>]) -> Vec<KvPage<'a>> {
    past.iter().copied().chain([chunk.own()]).collect()
}

/// The kind in which sums over many tokens are kept: f64 for f64, else f32.
pub fn accumulation_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}
