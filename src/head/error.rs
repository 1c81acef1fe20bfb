//! What can go wrong in a head.

use crate::native::BackwardError;
use crate::units::{Exit, Failure};

#[derive(Debug, thiserror::Error)]
pub enum HeadError {
    /// The batch brings another kind of target.
    #[error("the head `{head}` needs {expected}, the data has {found}")]
    WrongTargets {
        /// Recipe name of the head.
        head: &'static str,
        /// The kind of target that the head needs, such as `labels`.
        expected: &'static str,
        /// The kind of target in the data, such as `class indices`.
        found: &'static str,
    },
    /// Autograd through the head failed.
    #[error(transparent)]
    Backward(#[from] BackwardError),
    /// Losses could not be read.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}

impl Failure for BackwardError {}

impl Failure for HeadError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::WrongTargets { .. } => Some("choose the `head.kind` that fits the data".into()),
            Self::Backward(_) | Self::Torch(_) => None,
        }
    }

    fn exit(&self) -> Exit {
        match self {
            Self::WrongTargets { .. } => Exit::Data,
            Self::Backward(_) | Self::Torch(_) => Exit::Failed,
        }
    }
}
