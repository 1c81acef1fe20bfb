//! What can go wrong in a bench.

use std::path::PathBuf;

use crate::recipe::RopeScalingRecipe;
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
    NoWeights { dir: PathBuf },
    /// Some lengths, and another number of sequences.
    #[error("`--tokens` has {lengths} lengths: the recipe has {sequences} sequences in a micro-batch")]
    OtherLengths {
        /// How many lengths were given.
        lengths: usize,
        /// `train.micro_batch_size`.
        sequences: usize,
    },
    /// The sequences are longer than what the model has positions for.
    #[error("`--tokens {tokens}`: the model has {positions} positions")]
    TooLong {
        tokens: usize,
        /// The longest that the model is made for.
        positions: usize,
    },
}

impl Failure for BenchError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::NoWeights { .. } => Some("give `--random-weights` to draw them, or name a model in safetensors".into()),
            Self::TooLong { tokens, positions } => {
                Some(format!("ask for fewer tokens, or {}", RopeScalingRecipe::hint(*tokens, *positions)))
            }
            Self::OtherLengths { .. } => {
                Some("give one length for all sequences or one for each, or set `train.micro_batch_size`".into())
            }
            Self::Train(e) => e.hint(),
        }
    }

    fn exit(&self) -> Exit {
        match self {
            Self::NoWeights { .. } => Exit::Data,
            Self::TooLong { .. } | Self::OtherLengths { .. } => Exit::Usage,
            Self::Train(e) => e.exit(),
        }
    }
}
