//! Everything that a person reads: console, tables, progress, metrics, event files, summary.

pub mod console;
pub mod evicted;
pub mod memory;
pub mod metrics;
pub mod program;
pub mod progress;
pub mod summary;
pub mod table;
pub mod tensorboard;
pub mod tokenising;

use std::path::PathBuf;

use crate::files::FilesError;
use crate::units::{Exit, Failure};

/// What can go wrong when something is to be read.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// A file could not be written or read.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// A result could not be handed over.
    #[error("cannot write to standard output")]
    Output { source: std::io::Error },
    /// A line of the metrics is another than was written.
    #[error("`{path}`, line {line}: {what}", path = path.display())]
    ChangedLine {
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        what: String,
    },
    /// A line of the metrics is not what was written.
    #[error("`{path}`, line {line}: not a line of metrics", path = path.display())]
    BrokenLine {
        path: PathBuf,
        /// Counted from 1.
        line: usize,
    },
}

impl Failure for ReportError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Files(e) => e.hint(),
            Self::Output { .. } => Some("look at where the output goes, as that disk may be full, and ask again".into()),
            Self::BrokenLine { .. } | Self::ChangedLine { .. } => {
                Some("restore the file, or remove it to begin a new one".into())
            }
        }
    }

    /// Where something is not written, the work itself is done.
    fn exit(&self) -> Exit {
        match self {
            Self::Files(error) => error.exit(),
            Self::BrokenLine { .. } | Self::ChangedLine { .. } => Exit::Data,
            Self::Output { .. } => Exit::Failed,
        }
    }
}
