//! What can go wrong in a proof.

use crate::engine::EngineError;
use crate::head::HeadError;
use crate::model::AttendError;
use crate::native::BackwardError;
use crate::units::{Exit, Failure};

/// An error of the proof itself, not a difference that it found.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Head(#[from] HeadError),
    #[error(transparent)]
    Attend(#[from] AttendError),
    /// Autograd through the reference failed.
    #[error(transparent)]
    Backward(#[from] BackwardError),
    /// The loss is not finite, so that there is nothing to compare.
    #[error("the loss is not finite, in sample {sample} (counted from 0)")]
    NotFinite {
        /// The first such sample, as an index in its file from 0.
        sample: u64,
    },
    /// The walk met a choice that no cache could make.
    #[error("layer {layer}, chunk {chunk}: the replay log evicts {what}")]
    ImpossibleChoice {
        layer: usize,
        chunk: usize,
        /// `slot 40 of 32`, or `slot 7 twice`.
        what: String,
    },
}

impl Failure for VerifyError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::NotFinite { .. } => Some("look at this sample and at the model's weights".into()),
            Self::ImpossibleChoice { .. } => Some("this is a defect of kvtune: please report it".into()),
            _ => self.origin()?.hint(),
        }
    }

    fn exit(&self) -> Exit {
        match self {
            Self::NotFinite { .. } => Exit::NotFinite,
            // The engine has run on the same targets before.
            Self::Head(_) => Exit::Failed,
            _ => self.origin().map_or(Exit::Failed, Failure::exit),
        }
    }

    fn origin(&self) -> Option<&dyn Failure> {
        match self {
            Self::Engine(e) => Some(e),
            Self::Head(e) => Some(e),
            _ => None,
        }
    }
}
