//! What can go wrong in a step.

use crate::head::HeadError;
use crate::native::BackwardError;
use crate::recipe::OpenKey;
use crate::units::{Exit, Failure, Fault, FaultKind, PassedFault};

#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(transparent)]
    Passed(PassedFault),
    #[error(transparent)]
    Head(#[from] HeadError),
    #[error(transparent)]
    Attend(#[from] crate::model::AttendError),
    #[error(transparent)]
    Backward(#[from] BackwardError),
    /// Keys of the recipe that are open still: an engine is built from a recipe that says everything.
    #[error("{}", undecided(keys))]
    Open {
        /// The open keys within `[grad]`.
        keys: Vec<OpenKey>,
    },
    /// Chunks whose size is drawn or bent would evict their own tokens, or protected ones.
    #[error(
        "`kv_cache.chunk_size` = {chunk_size} makes chunks of up to {longest} tokens, as their sizes vary; layer {layer} with \
         `cache_length` = {cache_length} takes at most {allowed}"
    )]
    LongestChunk {
        chunk_size: usize,
        /// Tokens of the longest chunk that can come.
        longest: usize,
        /// The first layer that is too small.
        layer: usize,
        cache_length: usize,
        /// The longest chunk with which this layer evicts neither the chunk's own tokens nor a protected one.
        allowed: usize,
        /// The largest `chunk_size` that works; 0 where none does.
        largest: usize,
    },
    /// A session is extended by no tokens, or by those of another number of sequences.
    #[error("a session of {expected} sequences can not be extended by {} × {} tokens", found.0, found.1)]
    SessionIds {
        /// Sequences and tokens that were to come.
        found: (i64, i64),
        expected: i64,
    },
    /// A session is extended beyond what it was made for.
    #[error("a session of at most {max_tokens} tokens can not be extended to {tokens}")]
    SessionLength {
        /// Tokens of each sequence with those that were to come.
        tokens: usize,
        /// What the session was made for.
        max_tokens: usize,
    },
    /// A saved session is of another kind of model or batch.
    #[error("the saved session does not fit: expected {expected}, found {found}")]
    OtherSession { expected: String, found: String },
    /// The batch has no sequences, or a sequence has no tokens.
    #[error("the batch has a sequence without tokens")]
    EmptySequence,
    /// The batch has no target at all.
    #[error("no token of the batch has a target")]
    NoTargets,
    /// The observer asked to stop.
    #[error("interrupted")]
    GivenUp,
    #[error("out of memory: {0}")]
    OutOfMemory(String),
    /// libtorch failed in another way.
    #[error("libtorch: {0}")]
    Torch(String),
    /// After a cell a cache did not stand at the cell's left border: a defect of the engine.
    #[error("layer {layer}: after its cell the cache stands after {stands} chunks, expected {expected}")]
    Misplaced { layer: usize, stands: usize, expected: usize },
}

impl From<Fault> for EngineError {
    fn from(fault: Fault) -> Self {
        Self::Passed(PassedFault(fault))
    }
}

impl Failure for EngineError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::SessionIds { .. } => Some("give every sequence of the session its next tokens".into()),
            Self::OtherSession { .. } => Some("read the document again with this model".into()),
            Self::SessionLength { .. } => Some("begin a session for more tokens".into()),
            Self::Open { .. } => Some("`kvtune plan --recipe FILE` says what it would choose; write that".into()),
            Self::LongestChunk { largest: 0, .. } => {
                Some("raise `kv_cache.cache_length`, or set `randomize_chunk_sizes = false` and `chunking = \"plain\"`".into())
            }
            Self::LongestChunk { largest, .. } => {
                Some(format!("set `kv_cache.chunk_size = {largest}`, or raise `kv_cache.cache_length`"))
            }
            Self::EmptySequence | Self::NoTargets => {
                Some("look at the data: every sample needs tokens, every batch a target".into())
            }
            Self::OutOfMemory(_) => Some(
                "lower `train.micro_batch_size`, `grad.layers_per_cell` or `grad.chunks_per_cell_multiplier`, or set \
                 `grad.layer_checkpoints = \"int8\"`; where the host's memory is short, `grad.layer_checkpoints_place = \"file\"`"
                    .into(),
            ),
            Self::GivenUp => Some("begin it again".into()),
            Self::Misplaced { .. } => Some("this is a defect of kvtune: please report it".into()),
            _ => self.origin()?.hint(),
        }
    }

    fn kind(&self) -> FaultKind {
        match self {
            Self::OutOfMemory(_) => FaultKind::OutOfMemory,
            Self::Torch(_) => FaultKind::Torch,
            Self::GivenUp => FaultKind::Interrupted,
            _ => self.origin().map_or(FaultKind::Other, Failure::kind),
        }
    }

    fn exit(&self) -> Exit {
        match self {
            Self::Open { .. } | Self::LongestChunk { .. } => Exit::Usage,
            Self::EmptySequence | Self::NoTargets | Self::OtherSession { .. } => Exit::Data,
            Self::OutOfMemory(_) => Exit::Memory,
            _ => self.origin().map_or(Exit::Failed, Failure::exit),
        }
    }

    fn origin(&self) -> Option<&dyn Failure> {
        match self {
            Self::Passed(e) => Some(e),
            Self::Head(e) => Some(e),
            Self::Attend(e) => Some(e),
            _ => None,
        }
    }
}

/// `` `grad.layers_per_cell = "auto"` was not decided``.
fn undecided(keys: &[OpenKey]) -> String {
    let written: Vec<String> = keys.iter().map(|key| format!("`grad.{key} = \"auto\"`")).collect();
    format!("{} {} not decided", written.join(", "), if keys.len() == 1 { "was" } else { "were" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::AttendError;
    use crate::native::cuda::GraphError;

    #[test]
    fn graphs_that_cannot_be_had_have_a_way_out() {
        let error = EngineError::from(AttendError::from(GraphError::Lacking("this libtorch has no `x`".into())));
        assert_eq!(error.to_string(), "no CUDA graph can be captured: this libtorch has no `x`");
        assert!(error.hint().is_some_and(|hint| hint.starts_with("set `grad.cuda_graphs = false`")));
    }
}
