//! What can go wrong in a bench.

use std::path::PathBuf;

use crate::train::TrainError;
use crate::units::Hint;

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

impl Hint for BenchError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Train(e) => e.hint(),
            Self::NoWeights { .. } => Some("give `--random-weights` to draw them, or name a model in safetensors".into()),
            Self::TooLong { .. } => {
                Some("ask for fewer tokens, or raise `max_position_embeddings` in the model's `config.json`".into())
            }
        }
    }
}
