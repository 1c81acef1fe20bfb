//! What can go wrong with a cache.

use crate::recipe::RecipeError;
use crate::units::{Hint, LayerIdx};

/// An error of the cache.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The recipe names a policy that does not exist, or parameters that it does not have.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// A chunk would evict its own tokens, or protected ones.
    #[error(
        "`kv_cache.chunk_size` = {chunk_size} is too large for {layer}: with `cache_length` = {cache_length}, {sinks} first and {grace} \
         youngest tokens that are never evicted, the largest that works is {largest}"
    )]
    ChunkTooLarge {
        /// As in the recipe.
        chunk_size: usize,
        /// `layer 3`, or `every layer`.
        layer: String,
        /// Slots of that layer.
        cache_length: usize,
        /// First tokens that stay.
        sinks: usize,
        /// Youngest tokens that stay.
        grace: usize,
        /// The largest chunk that works; 0 where none does.
        largest: usize,
    },
    /// A dense cache that may not grow has fewer slots than the sequence has tokens.
    #[error(
        "a sequence of {tokens} tokens does not fit the dense cache of layer {layer}: `kv_cache.cache_length` = {cache_length}"
    )]
    Full {
        /// Tokens of the sequence.
        tokens: usize,
        /// The layer.
        layer: LayerIdx,
        /// Its slots.
        cache_length: usize,
    },
    /// A list of cache lengths does not have one per layer.
    #[error("`kv_cache.cache_length` lists {found} lengths, the model has {expected} layers")]
    WrongNumberOfLengths {
        /// As in the recipe.
        found: usize,
        /// Layers.
        expected: usize,
    },
    /// Chunks were written or unwound out of order: a defect of the engine.
    #[error("layer {layer}: {action} chunk {chunk}, but the cache stands after {stands} chunks")]
    OutOfOrder {
        /// The layer.
        layer: LayerIdx,
        /// `write` or `unwind`.
        action: &'static str,
        /// Index of the chunk (pieces of the prefill span counted one by one).
        chunk: usize,
        /// How many chunks the cache holds.
        stands: usize,
    },
    /// The replay log has no choice for a chunk that evicts, or one of another size.
    #[error("layer {layer}: the replay log does not fit chunk {chunk}: expected {expected} evictions, found {found}")]
    LogMismatch {
        /// The layer.
        layer: LayerIdx,
        /// Index of the chunk.
        chunk: usize,
        /// Evictions that the chunk needs.
        expected: usize,
        /// Evictions in the log.
        found: usize,
    },
}

impl Hint for CacheError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Recipe(e) => e.hint(),
            Self::ChunkTooLarge { largest: 0, .. } => Some("raise `kv_cache.cache_length`, or protect fewer tokens".into()),
            Self::ChunkTooLarge { largest, .. } => {
                Some(format!("set `kv_cache.chunk_size = {largest}`, or raise `kv_cache.cache_length`"))
            }
            Self::Full { tokens, .. } => Some(format!(
                "set `kv_cache.storage = \"growing\"`, or `kv_cache.cache_length = {tokens}`, or a policy that evicts such as \"h2o\""
            )),
            Self::WrongNumberOfLengths { .. } => Some("give one number for all layers, or one per layer".into()),
            Self::OutOfOrder { .. } | Self::LogMismatch { .. } => Some("this is a defect of kvtune: please report it".into()),
        }
    }
}
