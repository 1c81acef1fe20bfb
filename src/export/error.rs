//! What can go wrong with an export.

use std::path::PathBuf;

use crate::checkpoint::CheckpointError;
use crate::conformance::ConformanceError;
use crate::files::FilesError;
use crate::model::ModelError;
use crate::report::ReportError;
use crate::units::{Exit, Failure, abridged};

/// An error of an export.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The model or the adapter can't be read, merged or written.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A file can't be read or written.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// The checkpoint can't be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The policy's file can't be read.
    #[error(transparent)]
    Conformance(#[from] ConformanceError),
    /// The figures of the run can't be read.
    #[error(transparent)]
    Report(#[from] ReportError),
    /// There is something where the export would go.
    #[error("`{dir}` exists and is not empty", dir = abridged(dir.display()))]
    NotEmpty { dir: PathBuf },
    /// Nobody says which model an adapter belongs to, or it is not there.
    #[error("the base model of `{checkpoint}` is not known: {why}", checkpoint = abridged(checkpoint.display()), why = abridged(why))]
    NoBase { checkpoint: PathBuf, why: String },
    /// The base is not what the adapter was trained on.
    #[error("`{base}` is not the model that `{checkpoint}` was trained on", base = abridged(base.display()), checkpoint = abridged(checkpoint.display()))]
    OtherBase { base: PathBuf, checkpoint: PathBuf },
    /// A server does not load such an adapter.
    #[error("{server} can't load this adapter: {}", reasons.join("; "))]
    Unloadable { server: &'static str, reasons: Vec<String> },
    /// A server computes other positions than were trained with.
    #[error("{server} has no rotary embeddings of the kind `{kind}`, with which this was trained")]
    OtherPositions {
        server: &'static str,
        /// As in `model.rope_scaling`.
        kind: &'static str,
    },
    /// Whole models are no adapters.
    #[error("`{checkpoint}` holds a whole model, not an adapter", checkpoint = abridged(checkpoint.display()))]
    WholeModel { checkpoint: PathBuf },
}

impl Failure for ExportError {
    fn hint(&self) -> Option<String> {
        Some(match self {
            Self::NotEmpty { .. } => "choose another `--out`, or empty the directory".into(),
            Self::NoBase { .. } => "say where it is with `--base DIR`".into(),
            Self::OtherBase { .. } => "restore the model, or say where the right one is with `--base DIR`".into(),
            Self::Unloadable { .. } => "use `--for merged`: the server then loads a model like its base".into(),
            Self::OtherPositions { .. } => "use it with kvtune, or train without `model.rope_scaling`".into(),
            Self::WholeModel { .. } => "use `--for merged`, which writes it as a model directory".into(),
            _ => return self.origin()?.hint(),
        })
    }

    fn exit(&self) -> Exit {
        match self {
            Self::NotEmpty { .. }
            | Self::NoBase { .. }
            | Self::Unloadable { .. }
            | Self::OtherPositions { .. }
            | Self::WholeModel { .. } => Exit::Usage,
            Self::OtherBase { .. } => Exit::Data,
            _ => self.origin().map_or(Exit::Data, Failure::exit),
        }
    }

    fn origin(&self) -> Option<&dyn Failure> {
        match self {
            Self::Model(e) => Some(e),
            Self::Files(e) => Some(e),
            Self::Checkpoint(e) => Some(e),
            Self::Conformance(e) => Some(e),
            Self::Report(e) => Some(e),
            _ => None,
        }
    }
}
