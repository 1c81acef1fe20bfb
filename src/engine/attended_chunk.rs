//! What is kept of a chunk's attention for its backward, and what a policy may ask of it.

use tch::Tensor;

use crate::cache::{ChunkAttention, Placement, Queries};
use crate::ops::attention::{Attended, KvBlock, Qkv, attention_mass, attention_weights};

/// What a chunk's backward needs, and nothing of the size of the cache.
#[derive(Debug)]
pub(super) struct ChunkSaved {
    /// The chunk by the columns of its region.
    pub(super) chunk: Qkv,
    pub(super) attended: Attended,
    pub(super) placement: Placement,
}

/// The attention of a chunk that has just attended, for the policy to ask about.
pub(super) struct AttendedChunk<'a> {
    pub(super) saved: &'a ChunkSaved,
    pub(super) past: &'a [KvBlock],
    /// What was summed while the chunk attended.
    pub(super) mass: Option<(Queries, Tensor)>,
}

impl ChunkAttention for AttendedChunk<'_> {
    fn mass(&self, queries: Queries) -> Tensor {
        if let Some((summed, mass)) = &self.mass
            && *summed == queries
        {
            return mass.shallow_clone();
        }
        let lse = self.saved.placement.silence(&self.saved.attended.lse_bhn);
        attention_mass(&self.saved.chunk, self.past, &lse, queries)
    }

    fn weights(&self, last: usize) -> Tensor {
        let lse = self.saved.placement.silence(&self.saved.attended.lse_bhn);
        attention_weights(&self.saved.chunk, self.past, &lse, Queries::Last(last))
    }

    fn queries(&self) -> (Tensor, f64) {
        (self.saved.chunk.q_bhnd.shallow_clone(), self.saved.chunk.rule.scale)
    }

    fn entries(&self) -> (Tensor, Tensor) {
        let all = |of: fn(&KvBlock) -> &Tensor| {
            Tensor::cat(&self.past.iter().chain([&self.saved.chunk.own]).map(of).collect::<Vec<_>>(), 2)
        };
        (all(|block| &block.k), all(|block| &block.v))
    }
}
