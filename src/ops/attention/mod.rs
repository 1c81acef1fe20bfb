//! Attention of a chunk to the past and to itself, its backward, and the attention paid to each slot.
//!
//! Flash attention in the sense of Dao 2023 (arXiv 2307.08691): forward keeps the log-sum-exp, backward recomputes the weights. Whose
//! kernel it is, and whether past and chunk are seen at once or as parts that are merged, is the [`Way`].

mod blocks;
mod calibrate;
mod chunk;
mod joined;
mod merged;
mod paid;
mod part;
#[cfg(test)]
mod tests;
mod way;

use tch::{Kind, Tensor};

pub use calibrate::{Calibration, Timed, calibrate, calibrations, in_words, measure};
pub use chunk::{Attended, AttentionGrads, Chunk, Past, Queries};
pub use paid::attention_paid;
pub use part::PartKernel;
#[cfg(test)]
pub(crate) use way::forced;
pub use way::{Shape, Way};

use crate::native;

/// Attends a chunk to its past (all of it, part by part) and causally to itself.
///
/// # Shapes
/// As in [`Chunk`] and [`Past`].
pub fn attend(chunk: Chunk<'_>, past: &[Past<'_>]) -> Attended {
    attend_and_sum(chunk, past, None).0
}

/// As [`attend`], and where some queries are asked for, and the kernel makes it on the way, the attention that they paid, as in
/// [`attention_paid`].
pub fn attend_and_sum(chunk: Chunk<'_>, past: &[Past<'_>], asked: Option<Queries>) -> (Attended, Option<Tensor>) {
    attend_by(Way::of(&chunk, past), chunk, past, asked)
}

fn attend_by(way: Way, chunk: Chunk<'_>, past: &[Past<'_>], asked: Option<Queries>) -> (Attended, Option<Tensor>) {
    match (way, chunk.joined_bgcd) {
        (Way::Own, _) => {
            let first = asked.map(|queries| queries.first(chunk.q_bhnd.size()[2]));
            let (out_bhnd, lse_bhn, sums) = native::attend(chunk.q_bhnd, &all_parts(&chunk, past), chunk.scale, first);
            (Attended { out_bhnd, lse_bhn }, sums.map(|sums| sums / chunk.per_group()))
        }
        (Way::Joined(vendor), Some(keys)) => (joined::attend(vendor, chunk, keys), None),
        (Way::Joined(vendor), None) => (merged::attend(PartKernel::Vendor(vendor), chunk, past), None),
        (Way::Parts(kernel), _) => (merged::attend(kernel, chunk, past), None),
    }
}

/// The backward of [`attend`].
///
/// # Shapes
/// `dout_bhnd (B, H, n, D)`; the rest as in [`AttentionGrads`].
pub fn attend_backward(dout_bhnd: &Tensor, chunk: Chunk<'_>, past: &[Past<'_>], merged: &Attended) -> AttentionGrads {
    attend_backward_by(Way::of(&chunk, past), dout_bhnd, chunk, past, merged)
}

fn attend_backward_by(way: Way, dout: &Tensor, chunk: Chunk<'_>, past: &[Past<'_>], attended: &Attended) -> AttentionGrads {
    match (way, chunk.joined_bgcd) {
        (Way::Own, _) => {
            let out = (&attended.out_bhnd, &attended.lse_bhn);
            let grads = native::attend_backward(dout, chunk.q_bhnd, &all_parts(&chunk, past), out, chunk.scale);
            let mut past: Vec<(Tensor, Tensor)> = grads.dk_bgpd.into_iter().zip(grads.dv_bgpd).collect();
            let (dk_bgnd, dv_bgnd) = past.pop().unwrap_or_default();
            AttentionGrads { dq_bhnd: grads.dq_bhnd, dk_bgnd, dv_bgnd, past }
        }
        (Way::Joined(vendor), Some(keys)) => joined::attend_backward(vendor, dout, chunk, keys, attended),
        (Way::Joined(vendor), None) => merged::attend_backward(PartKernel::Vendor(vendor), dout, chunk, past, attended),
        (Way::Parts(kernel), _) => merged::attend_backward(kernel, dout, chunk, past, attended),
    }
}

/// Keys and values part by part, the chunk's own last.
fn all_parts<'a>(chunk: &Chunk<'a>, past: &[Past<'a>]) -> Vec<Past<'a>> {
    past.iter().copied().chain([chunk.own()]).collect()
}

/// The kind in which sums over many tokens are kept: f64 for f64, else f32.
pub fn accumulation_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}
