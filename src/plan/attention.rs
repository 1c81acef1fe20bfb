//! What attention of a chunk to its past takes for a moment, in the kernel that would run.

use super::StepSpec;
use crate::cache::CacheShape;
use crate::native::{self, AttentionShape};

/// The most bytes at a time, in addition to queries, keys, values and output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Kernel {
    pub(super) forward: u64,
    pub(super) backward: u64,
}

/// Numbers of a policy by entry while it scores and chooses: scores, sums, orders and indices.
const SCORE_BYTES: u64 = 32;

impl Kernel {
    /// Of chunks of `chunk` tokens a sequence, in a layer whose cache holds `slots` of `shape` with them.
    pub(super) fn of(spec: &StepSpec<'_>, shape: &CacheShape, (chunk, slots): (u64, u64), is_choosing: bool) -> Self {
        let heads = (shape.batch * shape.groups) as u64;
        let restored = shape.restored_bytes(slots as usize).0;
        let scores = if is_choosing { SCORE_BYTES * heads * slots } else { 0 };
        let kernel = if native::computes(spec.device, spec.kind) {
            Self::own(spec, shape.batch as usize, (chunk, slots))
        } else {
            Self::in_parts(spec, shape.batch as u64, (chunk, slots))
        };
        let of_drains = Self::of_drains(spec, shape.batch as u64 * chunk);
        Self {
            forward: kernel.forward.max(scores).max(of_drains.forward) + restored,
            backward: kernel.backward.max(of_drains.backward) + restored,
        }
    }

    /// Of heads with drains: log-sum-exps without and with them, and what they leave; where they are trained, products with the output.
    fn of_drains(s: &StepSpec<'_>, tokens: u64) -> Self {
        let attention = &s.config.layers[0].attention;
        let numbers = |per_token: u64| if attention.has_drain { tokens * per_token * s.wide() } else { 0 };
        let of_products = if s.trains_weights() { s.queries() } else { 0 };
        Self { forward: numbers(3 * attention.num_heads as u64), backward: numbers(of_products) }
    }

    /// kvtune's own: what it works on, the gradients of keys and values, and of choosing the sums.
    fn own(s: &StepSpec<'_>, batch: usize, (chunk, slots): (u64, u64)) -> Self {
        let shape = AttentionShape {
            batch,
            heads: s.config.layers[0].attention.num_heads,
            groups: s.config.layers[0].attention.num_kv_heads,
            tokens: chunk as usize,
            width: s.config.layers[0].attention.head_dim,
            keys: slots as usize,
        };
        let (forward, backward) = shape.scratch(s.threads);
        let keys = batch as u64 * slots * s.config.layers[0].attention.num_kv_heads as u64;
        Self {
            forward: s.wide() * (forward + 2 * keys),
            backward: s.wide() * (backward + 2 * keys * s.config.layers[0].attention.head_dim as u64),
        }
    }

    /// In parts: an output and a log-sum-exp for the past and for the chunk, which are merged in more bits, and gradients of both. On
    /// CUDA a kernel may make gradients of keys for each query head, before it adds up those of a group.
    fn in_parts(s: &StepSpec<'_>, batch: u64, (chunk, slots): (u64, u64)) -> Self {
        let (queries, keys) = (batch * chunk * s.queries(), batch * slots * s.keys());
        let of_heads = if s.device.is_cuda() { 2 * batch * slots * (s.queries() + s.keys()) * s.element() } else { 0 };
        Self {
            forward: queries * (2 * s.element() + 3 * s.wide()),
            backward: queries * (2 * s.element() + 2 * s.wide()) + (2 * keys * s.wide()).max(of_heads),
        }
    }
}
