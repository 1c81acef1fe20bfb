//! What can go wrong with a cache.

use std::path::PathBuf;

use crate::files::FilesError;
use crate::recipe::RecipeError;
use crate::store::StoreError;
use crate::units::{Exit, Failure, LayerIdx, abridged, quoted};

#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The recipe names a policy that does not exist, or parameters that it does not have.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// A replay log could not be read or written.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// What was overwritten could not be kept or fetched.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A file holds no replay log, or one that no cache could have made.
    #[error("`{}` is not a valid replay log: {reason}", abridged(path.display()), reason = abridged(reason))]
    NotALog { path: PathBuf, reason: String },
    /// A replay log that is to be followed was made elsewhere.
    #[error("the replay log belongs to another model or batch: expected {expected}, found {found}", found = quoted(found))]
    OtherLog {
        /// What a log of this model, recipe and batch says.
        expected: String,
        found: String,
    },
    /// A snapshot was taken from a cache of another kind.
    #[error("layer {layer}: `{tensor}` of a saved cache does not fit: expected {expected}, found {found}", tensor = quoted(tensor), found = quoted(found))]
    OtherSnapshot {
        layer: LayerIdx,
        tensor: String,
        /// What the cache of this model and recipe has.
        expected: String,
        found: String,
    },
    /// A chunk would evict its own tokens, or protected ones.
    #[error(
        "`kv_cache.chunk_size` = {chunk_size} is too large for {layer}: with `cache_length` = {cache_length}, {}{sinks} first and \
         {grace} youngest tokens that are never evicted, the largest that works is {largest}",
        further(*share, *initial)
    )]
    ChunkTooLarge {
        chunk_size: usize,
        /// `layer 3`, or `every layer`.
        layer: String,
        cache_length: usize,
        sinks: usize,
        grace: usize,
        /// The smallest share of a head, where slots are shared out.
        share: Option<usize>,
        /// Tokens of a prompt's initial part that stay.
        initial: usize,
        /// The largest chunk that works; 0 where none does.
        largest: usize,
    },
    /// A dense cache that may not grow has fewer slots than the sequence has tokens.
    #[error(
        "a sequence of {tokens} tokens does not fit the dense cache of layer {layer}: `kv_cache.cache_length` = {cache_length}"
    )]
    Full { tokens: usize, layer: LayerIdx, cache_length: usize },
    /// The policy weighs the errors of quantisation, and the buffer makes none.
    #[error("the policy `{policy}` weighs the errors of quantisation, and `kv_cache.buffer = \"plain\"` makes none")]
    NothingQuantised { policy: String },
    /// A list of cache lengths does not have one per layer.
    #[error("`kv_cache.cache_length` lists {found} lengths, the model has {expected} layers")]
    WrongNumberOfLengths { found: usize, expected: usize },
    /// Chunks were written or unwound out of order: a defect of the engine.
    #[error("layer {layer}: {action} chunk {chunk}, but the cache stands after {stands} chunks")]
    OutOfOrder {
        layer: LayerIdx,
        /// Either `write` or `unwind`, for the message.
        action: &'static str,
        /// Index of the chunk (pieces of the prefill span counted one by one).
        chunk: usize,
        /// How many chunks the cache holds.
        stands: usize,
    },
    /// The replay log has no choice for a chunk that evicts, or one of another size.
    #[error("layer {layer}: the replay log does not fit chunk {chunk}: expected {expected} evictions, found {found}")]
    LogMismatch {
        layer: LayerIdx,
        chunk: usize,
        /// Evictions that the chunk needs.
        expected: usize,
        found: usize,
    },
}

/// The tokens that some policies protect beside the first and the youngest.
fn further(share: Option<usize>, initial: usize) -> String {
    let share = share.map(|share| format!("a smallest share of {share}, ")).unwrap_or_default();
    if initial == 0 { share } else { format!("{share}{initial} tokens of an initial part, ") }
}

impl Failure for CacheError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::NotALog { .. } => {
                Some("write it again with `kvtune verify --dump`; the file is damaged or something else".into())
            }
            Self::OtherLog { .. } => {
                Some("take the recipe, the data and the number of samples with which the log was written".into())
            }
            Self::OtherSnapshot { .. } => Some("read the document again with this model and these settings of the cache".into()),
            Self::ChunkTooLarge { largest, share, .. } => {
                let floor = if share.is_some() { " or the policy's `floor`" } else { "" };
                Some(match largest {
                    0 => format!("raise `kv_cache.cache_length`{floor}, or protect fewer tokens"),
                    _ => format!("set `kv_cache.chunk_size = {largest}`, or raise `kv_cache.cache_length`{floor}"),
                })
            }
            Self::Full { tokens, .. } => Some(format!(
                "set `kv_cache.storage = \"growing\"`, or `kv_cache.cache_length = {tokens}`, or a policy that evicts such as \"h2o\""
            )),
            Self::NothingQuantised { policy } => {
                let quantise = "set `kv_cache.buffer = \"int8\"` or `\"int4\"`";
                let plain = policy.strip_prefix('q').map(|plain| format!(", or write `policy = \"{plain}\"`"));
                Some(format!("{quantise}{}", plain.unwrap_or_default()))
            }
            Self::WrongNumberOfLengths { .. } => Some("give one number for all layers, or one per layer".into()),
            Self::OutOfOrder { .. } | Self::LogMismatch { .. } => Some("this is a defect of kvtune: please report it".into()),
            _ => self.origin()?.hint(),
        }
    }

    fn exit(&self) -> Exit {
        match self {
            Self::NotALog { .. } | Self::OtherLog { .. } | Self::OtherSnapshot { .. } => Exit::Data,
            Self::OutOfOrder { .. } | Self::LogMismatch { .. } => Exit::Failed,
            _ => self.origin().map_or(Exit::Usage, Failure::exit),
        }
    }

    fn origin(&self) -> Option<&dyn Failure> {
        match self {
            Self::Recipe(e) => Some(e),
            Self::Files(e) => Some(e),
            Self::Store(e) => Some(e),
            _ => None,
        }
    }
}
