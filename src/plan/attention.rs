//! What attention of a chunk to its past takes for a moment, in the kernel that would run.

use super::Subject;
use crate::cache::Shape;
use crate::native;

/// The most bytes at a time, beside queries, keys, values and output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Kernel {
    pub(super) forward: u64,
    pub(super) backward: u64,
}

/// Numbers of a policy by entry while it scores and chooses: scores, sums, orders and indices.
const SCORE_BYTES: u64 = 32;

impl Kernel {
    /// Of chunks of `chunk` tokens a row, in a layer whose cache holds `slots` of `shape` with them.
    pub(super) fn of(subject: &Subject<'_>, shape: &Shape, (chunk, slots): (u64, u64), is_choosing: bool) -> Self {
        let heads = (shape.batch * shape.groups) as u64;
        let restored = shape.restored_bytes(slots as usize).0;
        let scores = if is_choosing { SCORE_BYTES * heads * slots } else { 0 };
        let kernel = if native::attends(subject.device, subject.kind) {
            Self::own(subject, heads, (chunk, slots))
        } else {
            Self::of_vendor(subject, shape.batch as u64, (chunk, slots))
        };
        Self { forward: kernel.forward.max(scores) + restored, backward: kernel.backward + restored }
    }

    /// kvtune's own, as `native/shim/attention.cpp` has it.
    fn own(s: &Subject<'_>, heads: u64, (chunk, slots): (u64, u64)) -> Self {
        let per_group = (s.config.num_heads / s.config.num_kv_heads) as u64;
        let (w, d, threads) = (s.element(), s.config.head_dim as u64, s.threads as u64);
        let tokens = native::attention_block(chunk, per_group, slots);
        let rows = tokens * per_group;
        let blocks = chunk.div_ceil(tokens.max(1)).max(1);
        let busy = threads.min(heads * blocks);
        let splits = (4 * threads).div_ceil(heads).min(blocks);
        let splits_back = (threads / heads).max(1).min(blocks);
        let sums = 2 * heads * slots + heads * splits * slots;
        Self {
            forward: w * (busy * rows * (slots + 3 * d) + sums),
            backward: w * (busy * (2 * rows * slots + d * slots + 6 * rows * d) + 2 * heads * slots * d * (1 + splits_back)),
        }
    }

    /// A vendor's: an output and a log-sum-exp for the past and for the chunk, which are merged in more bits, and gradients of both.
    fn of_vendor(s: &Subject<'_>, batch: u64, (chunk, slots): (u64, u64)) -> Self {
        let (queries, keys) = (batch * chunk * s.queries(), batch * slots * s.keys());
        Self {
            forward: queries * (2 * s.element() + 3 * s.wide()),
            backward: queries * (2 * s.element() + 2 * s.wide()) + 2 * keys * s.wide(),
        }
    }
}
