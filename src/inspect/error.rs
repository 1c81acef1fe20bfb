//! What can go wrong when a run is looked at.

use std::path::PathBuf;

use crate::checkpoint::CheckpointError;
use crate::eval::EvalError;
use crate::files::FilesError;
use crate::recipe::RecipeError;
use crate::report::ReportError;
use crate::train::TrainError;
use crate::units::{Exit, Failure, abridged};
use crate::verify::VerifyError;

#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// A file could not be read.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// The metrics could not be read.
    #[error(transparent)]
    Report(#[from] ReportError),
    /// The run's recipe could not be read.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The checkpoints could not be looked at.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Train(#[from] TrainError),
    /// A file of answers could not be read.
    #[error(transparent)]
    Eval(#[from] EvalError),
    /// A log has choices that no cache can make.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// A log has fewer sequences.
    #[error("the log has no sequence {asked}: it has {found}, counted from 0")]
    NoSequence { asked: usize, found: usize },
    /// A line is not what an evaluation prints.
    #[error("`{path}`, line {line}: not a line of `kvtune evaluate --format json`: {message}", path = abridged(path.display()), message = abridged(message))]
    NotScores {
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        message: String,
    },
}

impl Failure for InspectError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::NoSequence { .. } => Some("choose another with `--sequence`".into()),
            Self::NotScores { .. } => Some("write the file with `kvtune evaluate … --format json >FILE`".into()),
            _ => self.origin()?.hint(),
        }
    }

    fn exit(&self) -> Exit {
        match self {
            Self::NoSequence { .. } => Exit::Usage,
            // The line that is broken was read, not written.
            Self::NotScores { .. } | Self::Report(ReportError::BrokenLine { .. }) => Exit::Data,
            _ => self.origin().map_or(Exit::Failed, Failure::exit),
        }
    }

    fn origin(&self) -> Option<&dyn Failure> {
        Some(match self {
            Self::Files(e) => e,
            Self::Report(e) => e,
            Self::Recipe(e) => e,
            Self::Checkpoint(e) => e,
            Self::Train(e) => e,
            Self::Eval(e) => e,
            Self::Verify(e) => e,
            Self::NoSequence { .. } | Self::NotScores { .. } => return None,
        })
    }
}
