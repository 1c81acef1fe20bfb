//! What a policy is: an order in which entries leave the cache.

use std::fmt::Debug;

use tch::Tensor;

use super::{CacheError, policies};
use crate::recipe::Choice;

/// What a policy may look at when it ranks the entries of one layer.
#[derive(Debug)]
pub struct Entries<'a> {
    /// Slots in use.
    pub filled: usize,
    /// Slots in all.
    pub cache_length: usize,
    /// How many entries will leave.
    pub num_evicted: usize,
    /// Length of the prefill span.
    pub prefill: usize,
    /// Position of the next token, which is the number of tokens seen.
    pub next_position: usize,
    /// Position of each entry `(B, G, filled)`, i64; −1 where a row has none.
    pub position_bgc: Tensor,
    /// Cumulative score `(B, G, filled)`, for policies with [`Policy::needs_attention`], once a chunk has been observed.
    pub score_bgc: Option<&'a Tensor>,
}

/// The order in which entries leave.
#[derive(Debug)]
pub enum Rank {
    /// Smallest positions first, the same for all rows and heads. The `keep_first` first tokens follow last, from the youngest of
    /// them down. It is an order, not a set: a row that ends in the chunk evicts fewer, and must lose what it would lose alone.
    ByPosition {
        /// Tokens at the start of the sequence that stay as long as others can leave.
        keep_first: usize,
    },
    /// Lowest score first, ties by smaller position; `(B, G, filled)` in f32.
    ByScore(Tensor),
}

/// Picks the slots which the next chunk overwrites. A further policy is one file with [`Policy::rank`] and a line in the registry.
pub trait Policy: Debug + Send {
    /// The order in which the entries of a layer leave.
    fn rank(&self, entries: &Entries<'_>) -> Rank;

    /// Youngest tokens that are not yet evictable.
    fn grace(&self) -> usize {
        0
    }

    /// First tokens that are never evicted.
    fn sinks(&self) -> usize {
        0
    }

    /// Whether the cache must sum up the attention paid to each slot.
    fn needs_attention(&self) -> bool {
        false
    }

    /// What a chunk adds to the scores, from the attention its queries paid `(B, G, filled)`.
    fn observe(&self, paid_bgc: Tensor) -> Tensor {
        paid_bgc
    }

    /// Whether entries may leave at all; without it a sequence longer than the cache is an error.
    fn evicts(&self) -> bool {
        true
    }

    /// The largest chunk that never evicts itself or a protected token.
    fn max_chunk_size(&self, cache_length: usize) -> usize {
        cache_length.saturating_sub(self.sinks() + self.grace())
    }
}

/// Builds the policy that a recipe names, for a layer of `cache_length` slots.
pub fn build(choice: &Choice, cache_length: usize) -> Result<Box<dyn Policy>, CacheError> {
    let (_, constructor) = policies::REGISTRY
        .iter()
        .find(|(name, _)| *name == choice.name)
        .ok_or_else(|| choice.unknown(&policies::REGISTRY.iter().map(|(name, _)| *name).collect::<Vec<_>>()))?;
    constructor(choice, cache_length)
}
