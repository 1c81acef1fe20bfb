//! What attention of a chunk to its past takes for a moment, in the kernel that would run.

use super::StepSpec;
use crate::cache::CacheShape;
use crate::model::AttentionSpec;
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
    /// Of chunks of `chunk` tokens a sequence, in the layer `index`, whose cache holds `slots` of `shape` with them.
    pub(super) fn of(
        spec: &StepSpec<'_>,
        index: usize,
        shape: &CacheShape,
        (chunk, slots): (u64, u64),
        is_choosing: bool,
    ) -> Self {
        let attention = &spec.config.layers[index].attention;
        let heads = (shape.batch * shape.groups) as u64;
        let restored = shape.restored_bytes(slots as usize).0;
        let scores = if is_choosing { SCORE_BYTES * heads * slots } else { 0 };
        let kernel = if native::computes(spec.device, spec.kind) {
            Self::own(spec, attention, shape.batch as usize, (chunk, slots))
        } else {
            Self::in_parts(spec, attention, shape.batch as u64, (chunk, slots))
        };
        let of_drains = Self::of_drains(spec, attention, shape.batch as u64 * chunk);
        Self {
            forward: kernel.forward.max(scores).max(of_drains.forward) + restored,
            backward: kernel.backward.max(of_drains.backward) + restored,
        }
    }

    /// Of heads with drains: log-sum-exps without and with them, and what they leave; where they are trained, products with the output.
    fn of_drains(s: &StepSpec<'_>, attention: &AttentionSpec, tokens: u64) -> Self {
        let numbers = |per_token: u64| if attention.has_sinks { tokens * per_token * s.wide() } else { 0 };
        let of_products = if s.trains_weights() { attention.widths()[0] as u64 } else { 0 };
        Self { forward: numbers(3 * attention.num_heads as u64), backward: numbers(of_products) }
    }

    /// kvtune's own: what it works on, the gradients of keys and values, and of choosing the sums.
    fn own(s: &StepSpec<'_>, attention: &AttentionSpec, batch: usize, (chunk, slots): (u64, u64)) -> Self {
        let shape = AttentionShape {
            batch,
            heads: attention.num_heads,
            groups: attention.num_kv_heads,
            tokens: chunk as usize,
            width: attention.head_dim,
            keys: slots as usize,
        };
        let (forward, backward) = shape.scratch(s.threads);
        let keys = batch as u64 * slots * attention.num_kv_heads as u64;
        Self { forward: s.wide() * (forward + 2 * keys), backward: s.wide() * (backward + 2 * keys * attention.head_dim as u64) }
    }

    /// In parts: an output and a log-sum-exp for the past and for the chunk, which are merged in more bits, and gradients of both. On
    /// CUDA a kernel may make gradients of keys for each query head, before it adds up those of a group.
    fn in_parts(s: &StepSpec<'_>, attention: &AttentionSpec, batch: u64, (chunk, slots): (u64, u64)) -> Self {
        let [of_query, of_key, _] = attention.widths().map(|width| width as u64);
        let (queries, keys) = (batch * chunk * of_query, batch * slots * of_key);
        let of_heads = if s.device.is_cuda() { 2 * batch * slots * (of_query + of_key) * s.element() } else { 0 };
        Self {
            forward: queries * (2 * s.element() + 3 * s.wide()),
            backward: queries * (2 * s.element() + 2 * s.wide()) + (2 * keys * s.wide()).max(of_heads),
        }
    }
}
