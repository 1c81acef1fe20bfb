//! What can go wrong with a checkpoint.

use std::path::PathBuf;

use crate::model::ModelError;
use crate::units::{Exit, Failure, Fault, FaultKind, PassedFault, abridged};

#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file could not be written or read.
    #[error(transparent)]
    Passed(PassedFault),
    /// What is trained could not be written or read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A directory has no manifest, so that its save has not ended.
    #[error("`{dir}` is not a finished checkpoint: it has no `MANIFEST.json`", dir = abridged(dir.display()))]
    Unfinished { dir: PathBuf },
    /// A file is not what the manifest says.
    #[error("`{path}` is damaged: {what}", path = abridged(path.display()))]
    Damaged { path: PathBuf, what: String },
    /// A file says what can't be, though it is as it was written.
    #[error("`{path}` can't be what this run has saved: {what}", path = path.display())]
    Contradiction { path: PathBuf, what: String },
    /// Written by a version with another format.
    #[error("`{dir}` has checkpoint format {found}, expected {expected}", dir = abridged(dir.display()))]
    Format { dir: PathBuf, found: u32, expected: u32 },
    /// What another rank has of the optimiser's state did not come.
    #[error("the optimiser's state can't be gathered: {reason}")]
    NotGathered { reason: String, hint: Option<String> },
    /// A run without any valid checkpoint.
    #[error("`{run}` has no valid checkpoint{reasons}", run = abridged(run.display()), reasons = listed(skipped))]
    None {
        run: PathBuf,
        /// What was there and why it does not count.
        skipped: Vec<(PathBuf, CheckpointError)>,
    },
}

fn listed(skipped: &[(PathBuf, CheckpointError)]) -> String {
    let lines: Vec<String> = skipped.iter().map(|(dir, why)| format!("\n  skipped `{}`: {why}", dir.display())).collect();
    lines.concat()
}

impl CheckpointError {
    /// Whether a checkpoint is not as it was written, so that the one before it is to be taken. What can't be judged is no damage: a file
    /// that may not be opened may be whole.
    pub(super) fn is_damage(&self) -> bool {
        match self {
            Self::Unfinished { .. } | Self::Damaged { .. } => true,
            Self::Passed(PassedFault(fault)) => {
                matches!(fault.kind(), FaultKind::Damaged | FaultKind::NotRegular | FaultKind::ForeignLink)
            }
            _ => false,
        }
    }
}

impl From<Fault> for CheckpointError {
    fn from(fault: Fault) -> Self {
        Self::Passed(PassedFault(fault))
    }
}

impl Failure for CheckpointError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Unfinished { .. } | Self::Damaged { .. } => Some("use another checkpoint of the run, as `step-000100`".into()),
            Self::Contradiction { .. } => {
                Some("restore what was changed, or move this checkpoint out of the run and go on from another".into())
            }
            Self::Format { .. } => Some("read it with the version of kvtune that wrote it".into()),
            Self::NotGathered { hint, .. } => hint.clone(),
            Self::None { .. } => Some("begin the run again with another `--out`, or remove this directory first".into()),
            _ => self.origin()?.hint(),
        }
    }

    fn exit(&self) -> Exit {
        match self {
            Self::NotGathered { .. } => Exit::Failed,
            _ => self.origin().map_or(Exit::Data, Failure::exit),
        }
    }

    fn origin(&self) -> Option<&dyn Failure> {
        match self {
            Self::Passed(e) => Some(e),
            Self::Model(e) => Some(e),
            _ => None,
        }
    }
}
