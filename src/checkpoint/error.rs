//! What can go wrong with a checkpoint.

use std::path::PathBuf;

use crate::files::FilesError;
use crate::model::ModelError;
use crate::store::StoreError;
use crate::units::{Exit, Failure, abridged, quoted};

/// An error of a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file could not be written or read.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// A tensor could not be written or read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What is trained could not be written or read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A directory has no manifest, so that its save has not ended.
    #[error("`{dir}` is not a finished checkpoint: it has no `MANIFEST.json`", dir = abridged(dir.display()))]
    Unfinished {
        /// The directory.
        dir: PathBuf,
    },
    /// A file is not what the manifest says.
    #[error("`{path}` is damaged: {what}", path = abridged(path.display()))]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// Written by a version with another format.
    #[error("`{dir}` has checkpoint format {found}, expected {expected}", dir = abridged(dir.display()), found = quoted(found))]
    Format {
        /// The directory.
        dir: PathBuf,
        /// As in its state.
        found: u32,
        /// What this version reads.
        expected: u32,
    },
    /// A run without any valid checkpoint.
    #[error("`{run}` has no valid checkpoint{reasons}", run = abridged(run.display()), reasons = listed(skipped))]
    None {
        /// The run's directory.
        run: PathBuf,
        /// What was there and why it does not count.
        skipped: Vec<(PathBuf, String)>,
    },
}

fn listed(skipped: &[(PathBuf, String)]) -> String {
    let lines: Vec<String> = skipped.iter().map(|(dir, why)| format!("\n  skipped `{}`: {why}", dir.display())).collect();
    lines.concat()
}

impl Failure for CheckpointError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Unfinished { .. } | Self::Damaged { .. } => Some("use another checkpoint of the run, as `step-000100`".into()),
            Self::Format { .. } => Some("read it with the version of kvtune that wrote it".into()),
            Self::None { .. } => Some("begin the run again with another `--out`, or remove this directory first".into()),
            _ => self.origin()?.hint(),
        }
    }

    fn exit(&self) -> Exit {
        self.origin().map_or(Exit::Data, Failure::exit)
    }

    fn origin(&self) -> Option<&dyn Failure> {
        match self {
            Self::Files(e) => Some(e),
            Self::Store(e) => Some(e),
            Self::Model(e) => Some(e),
            _ => None,
        }
    }
}
