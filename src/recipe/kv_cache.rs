//! What a checked recipe says of the cache: how the past is kept, and in which chunks it comes.

use super::cache_length::CacheLength;
use super::choice::PolicyRecipe;
use super::words::words;

/// `[kv_cache]`.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheRecipe {
    /// Which slots are overwritten, default `h2o`. The room `cache` knows which there are.
    pub policy: PolicyRecipe,
    /// Default `plain`.
    pub buffer: BufferKind,
    /// Slots, default 16384.
    pub cache_length: CacheLength,
    /// Tokens that are run in one call, default 1024.
    pub chunk_size: usize,
    /// Default `plain`.
    pub chunking: Chunking,
    /// Whether training draws the sizes of chunks around `chunk_size`, five for each step; default false.
    pub randomize_chunk_sizes: bool,
    /// Default `preallocated`.
    pub storage: Storage,
    /// Whether the slots wait on the host while other layers run, default false.
    pub cpu_offload: bool,
}

words! {
    /// How slots are stored.
    BufferKind {
        /// As they are.
        Plain = "plain",
        /// 8 bits a value, with a minimum and a scale per head vector.
        Int8 = "int8",
        /// 4 bits a value likewise.
        Int4 = "int4",
    }
}

impl BufferKind {
    /// Whether the undo log may round what was overwritten: of a quantised cache it keeps the cache's own few bits.
    pub fn undo_log_may_round(self) -> bool {
        self == Self::Plain
    }
}

words! {
    /// When the slots' memory is taken.
    Storage {
        /// At the start.
        Preallocated = "preallocated",
        /// As the sequence grows, by doubling; for the policy `dense`.
        Growing = "growing",
        /// As the sequence grows, page by page: nothing is copied; for the policy `dense`.
        Paged = "paged",
    }
}

words! {
    /// Where chunks end, behind the first tokens that every cache holds.
    Chunking {
        /// Every `chunk_size` tokens.
        Plain = "plain",
        /// As in the program `keys_values`: a chunk that would end less than five tokens before a layer's cache is full, or behind
        /// that, ends exactly there. It makes a difference where layers have caches of different length; then the borders follow
        /// the longest sequence of a batch, and a shorter one may see others than alone.
        Reference = "reference",
    }
}
