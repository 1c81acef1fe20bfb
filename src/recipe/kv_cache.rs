//! What a recipe says of the cache: how the past is kept, and in which chunks it comes.

use super::cache_length::CacheLength;
use super::choice::{DEFAULT_POLICY, PolicyRecipe};
use super::table::table;
use super::value::COUNT;
use super::words::words;

/// A cache that keeps all, as a recipe says it.
pub(super) const DENSE: &str = "kv_cache = { policy = 'dense', storage = 'growing' }";

/// Tokens of a chunk, where none are written and the caches take so many.
const DEFAULT_CHUNK_SIZE: usize = 1024;

table! {
    #[derive(Clone, Debug, PartialEq)]
    pub struct CacheRecipe in "kv_cache" {
        /// Which entries are evicted: `policy = "lastrec"`, or `policy.h2o = { grace_period = 64 }`.
        pub policy: PolicyRecipe = PolicyRecipe::named(DEFAULT_POLICY),
        /// How an entry is stored after its own chunk has attended.
        #[word("plain", "default")]
        #[word("int8", "torch-quantized8")]
        #[word("int4", "torch-quantized4")]
        pub buffer: BufferKind = BufferKind::Plain,
        /// Slots per KV head. A pyramid falls linearly from layer to layer.
        #[also("cache_length")]
        pub cache_length: CacheLength = CacheLength::Uniform(16384),
        /// Tokens of a chunk: at most the slots less what the policy protects.
        #[also("chunk_size")]
        #[rule(COUNT)]
        #[default("1024; where that is more than the caches take, half of the most that they take")]
        pub chunk_size: Option<usize> = None,
        /// With `reference`, chunks also end where a layer's cache becomes full, as in `keys_values`.
        pub chunking: Chunking = Chunking::Plain,
        /// Training draws the sizes of chunks around `chunk_size`, five for each step.
        #[also("randomize_chunk_sizes")]
        pub randomize_chunk_sizes: bool = false,
        /// Tokens that are decided upon together in decoding, and where `grad.single_tokens_for_targets` trains it; at most `chunk_size`.
        #[rule(COUNT)]
        pub decode_block: usize = 1,
        /// Texts are generated at fixed widths, whatever comes: all chunks of a prompt are computed as `chunk_size` tokens, all caches have
        /// their length from the beginning. A GPU then launches a layer as captured graphs.
        pub r#static: bool = false,
        /// Slots are allocated at once, by doubling, or by pages. The last two need the policy `dense`.
        #[default("`growing` for `dense` without a `cache_length`, else `preallocated`")]
        pub storage: Storage = Storage::Preallocated,
        /// Slots wait in the host's memory while other layers run.
        pub cpu_offload: bool = false,
    }
}

impl CacheRecipe {
    /// Tokens of a chunk as they are written, or by default. Where none are written it may be more than the caches take.
    pub fn wanted_chunk_size(&self) -> usize {
        self.chunk_size.unwrap_or(DEFAULT_CHUNK_SIZE)
    }
}

words! {
    pub enum BufferKind {
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
    pub enum Storage {
        Preallocated = "preallocated",
        /// Memory grows with the sequence, by doubling; for the policy `dense`.
        Growing = "growing",
        /// Memory grows with the sequence, page by page: nothing is copied; for the policy `dense`.
        Paged = "paged",
    }
}

words! {
    /// Where chunks end, behind the first tokens that every cache holds.
    pub enum Chunking {
        Plain = "plain",
        /// The borders of the program `keys_values`: a chunk that would end less than five tokens before a layer's cache is full, or behind
        /// that, ends exactly there. It makes a difference where layers have caches of different length; then the borders follow
        /// the longest sequence of a batch, and a shorter one may see others than alone.
        Reference = "reference",
    }
}
