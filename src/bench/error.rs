//! What can go wrong in a bench.

use std::path::PathBuf;

use crate::train::TrainError;
use crate::units::{Exit, Failure};

/// An error of a bench.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The model, its engine or a step refused.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// The model has a configuration and no weights.
    #[error("no weights in `{dir}`", dir = dir.display())]
    NoWeights {
        /// The model's directory.
        dir: PathBuf,
    },
    /// The sequences are longer than what the model has positions for.
    #[error("`--tokens {tokens}`: the model has {positions} positions")]
    TooLong {
        /// Tokens of a sequence.
        tokens: usize,
        /// `max_position_embeddings`.
        positions: usize,
    },
}

impl Failure for BenchError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::NoWeights { .. } => Some("give `--random-weights` to draw them, or name a model in safetensors".into()),
            Self::TooLong { .. } => {
                Some("ask for fewer tokens, or raise `max_position_embeddings` in the model's `config.json`".into())
            }
            Self::Train(e) => e.hint(),
        }
    }

    fn exit(&self) -> Exit {
        match self {
            Self::NoWeights { .. } => Exit::Data,
            Self::TooLong { .. } => Exit::Usage,
            Self::Train(e) => e.exit(),
        }
    }
}
