//! What is kept of a chunk's attention for its backward, what a policy may ask of it, and a chunk whose tokens come in parts.

use tch::Tensor;

use crate::cache::{ChunkAttention, ChunkSpan, Placement, Queries};
use crate::ops::attention::{Attended, KvBlock, Qkv, attention_mass, attention_weights};

/// What a chunk's backward needs, and nothing of the size of the cache.
#[derive(Debug)]
pub(super) struct ChunkSaved {
    /// The chunk by the slots of its region.
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
        if let Some((_, mass)) = self.mass.as_ref().filter(|(summed, _)| *summed == queries) {
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

/// The next tokens of a chunk whose tokens come in parts.
#[derive(Clone, Debug)]
pub(super) struct ChunkPart {
    pub(super) span: ChunkSpan,
    /// How many tokens of the chunk came before.
    pub(super) from: usize,
}

/// What has come of the chunk, part by part; exact, whatever the cache stores.
#[derive(Debug, Default)]
pub(super) struct PartialChunk {
    pub(super) q: Vec<Tensor>,
    pub(super) own: Vec<KvBlock>,
    pub(super) out: Vec<Tensor>,
    pub(super) lse: Vec<Tensor>,
}

impl Clone for PartialChunk {
    fn clone(&self) -> Self {
        // What has come is never changed.
        let all = |parts: &[Tensor]| parts.iter().map(Tensor::shallow_clone).collect();
        Self { q: all(&self.q), own: self.own.clone(), out: all(&self.out), lse: all(&self.lse) }
    }
}

impl PartialChunk {
    pub(super) fn add(&mut self, tokens: &Qkv, attended: &Attended) {
        // Copies: what a layer hands over may be written over for the next token.
        self.q.push(tokens.q_bhnd.copy());
        self.own.push(tokens.own.map(Tensor::copy));
        self.out.push(attended.out_bhnd.shallow_clone());
        self.lse.push(attended.lse_bhn.shallow_clone());
    }
}
