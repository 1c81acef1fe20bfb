//! The dimensions of a cache, and of the chunks that it writes and unwinds.

use tch::{Device, Kind};

use crate::ops::attention::ModelFeature;
use crate::recipe::BufferKind;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheShape {
    pub batch: i64,
    pub groups: i64,
    pub head_dim: i64,
    /// Widths of what an entry has beside key and value, plane by plane; stored as it is.
    pub further: &'static [i64],
    /// The number that the model says of each entry, where the policy asks for one: the plane behind these, which has no gradient.
    pub model_feature: Option<ModelFeature>,
    pub cache_length: usize,
    /// Slots to allocate at once; fewer than `cache_length` for a cache that grows, or a sequence that is shorter.
    pub allocated: usize,
    /// Whether a cache that grows does so by further pages of `allocated` slots instead of doubling.
    pub is_paged: bool,
    pub buffer: BufferKind,
    /// Whether keys and values wait on the host between [`LayerCache::offload`](super::LayerCache::offload) and [`LayerCache::prefetch`](super::LayerCache::prefetch).
    pub is_offloaded: bool,
    pub kind: Kind,
    pub device: Device,
}

/// Consecutive positions of the batch that are run in one call, and how many of them hold tokens in each sequence that is still under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkSpan {
    /// Number in the order of writing, by which errors and logs name the chunk; pieces of the prefill span count one by one.
    pub index: usize,
    /// Number of the cache event, 0 for all pieces of the prefill span, and one more for each chunk after it.
    pub chunk: usize,
    pub start: usize,
    pub len: usize,
    /// Per sequence, how many of the positions hold tokens; the rest are pads on the right. Sequences behind the last one that has tokens
    /// here have left the batch, and are not in it.
    pub real: Vec<usize>,
    /// Whether it is a block of decoding, whose victims leave before it is known how many of its tokens will come: a sequence that ends in it
    /// has given up as many slots as one that goes on.
    pub is_block: bool,
}

impl ChunkSpan {
    pub fn is_prefill(&self) -> bool {
        self.chunk == 0
    }

    pub fn num_sequences(&self) -> usize {
        self.real.len()
    }

    /// How many of the positions hold tokens of a sequence; none of one that has left.
    pub fn real_of(&self, sequence: usize) -> usize {
        self.real.get(sequence).copied().unwrap_or(0)
    }

    /// Slots that a sequence needs here.
    pub fn taken_by(&self, sequence: usize) -> usize {
        match self.real_of(sequence) {
            0 => 0,
            _ if self.is_block => self.len,
            real => real,
        }
    }

    pub fn is_ragged(&self) -> bool {
        self.real.iter().any(|&m| m < self.len)
    }

    /// Slots that the chunk needs beyond the free ones, for a cache of `capacity` slots of which `filled` are.
    pub fn evictions(&self, filled: usize, capacity: usize) -> usize {
        (filled + self.len).saturating_sub(capacity)
    }

    /// Per sequence, how many slots at the front of the chunk's region keep candidates that this sequence does not evict.
    pub fn retained(&self, filled: usize, capacity: usize) -> Vec<usize> {
        let e = self.evictions(filled, capacity);
        (0..self.real.len()).map(|b| e - (filled + self.taken_by(b)).saturating_sub(capacity).min(e)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_that_ends_in_the_chunk_keeps_some_candidates() {
        let span = ChunkSpan { index: 3, chunk: 2, start: 40, len: 5, real: vec![5, 2, 0], is_block: false };
        // 18 slots, 16 filled: 3 evictions; a sequence with 2 tokens needs none, nor does one with no token.
        assert_eq!(span.evictions(16, 18), 3);
        assert_eq!(span.retained(16, 18), [0, 3, 3]);
        assert_eq!(span.retained(18, 18), [0, 3, 5]);
        let block = ChunkSpan { is_block: true, ..span };
        assert_eq!(block.retained(16, 18), [0, 0, 3], "whether more tokens come is not known when the victims leave");
    }
}
