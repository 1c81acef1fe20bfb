//! What can go wrong in an evaluation.

use std::path::PathBuf;

use crate::data::DataError;
use crate::dist::DistError;
use crate::engine::EngineError;
use crate::files::FilesError;
use crate::generation::GenerationError;
use crate::metrics::MetricError;
use crate::units::{Exit, Failure, abridged, quoted};

/// An error of an evaluation.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// A batch could not be made.
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The file of answers can't be read or written.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// Another rank has failed, or can't be reached.
    #[error(transparent)]
    Dist(#[from] DistError),
    /// There is nothing to evaluate.
    #[error("there is no sample to evaluate")]
    Empty,
    /// A loss was not finite.
    #[error("the loss of sample {sample} (counted from 0) is {value}")]
    NotFinite { sample: u64, value: f64 },
    /// A sample was not answered.
    #[error("sample {sample} (counted from 0) can't be answered")]
    Answer { sample: u64, source: GenerationError },
    /// An answer can't be scored.
    #[error("the answer to sample {sample} (counted from 0) can't be scored: its reference is not what the metric needs")]
    Reference { sample: u64, source: MetricError },
    /// A line of a file of answers is none.
    #[error("`{}`, line {line}: not an answer of an evaluation: {message}", abridged(path.display()), message = abridged(message))]
    NotAnAnswer {
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        message: String,
    },
    /// An answer in a file belongs to something else.
    #[error("`{}`, line {line}: an answer with another `{what}`: expected {expected}, found {found}", abridged(path.display()), found = quoted(found))]
    OtherAnswers {
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        what: String,
        expected: String,
        found: String,
    },
    /// A file holds more answers than are asked for.
    #[error("`{}` holds more than the {asked} answers that are asked for", abridged(path.display()))]
    MoreAnswers { path: PathBuf, asked: usize },
}

impl EvalError {
    /// Whether it only says that this rank or another was asked to stop.
    pub fn is_given_up(&self) -> bool {
        matches!(self, Self::Engine(EngineError::GivenUp) | Self::Dist(DistError::OtherGaveUp { .. }))
    }
}

impl Failure for EvalError {
    fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Empty => "check the split and `data.on_too_long`: every sample may have been dropped",
            Self::NotFinite { .. } => "the weights or the adapter may be damaged, or the dtype too narrow for them",
            Self::Reference { .. } => "leave the metric out, or choose samples that it is made for",
            Self::NotAnAnswer { .. } | Self::OtherAnswers { .. } | Self::MoreAnswers { .. } => {
                "name another file with `--answers`, or remove this one to begin anew"
            }
            _ => return self.origin()?.hint(),
        };
        Some(hint.to_owned())
    }

    fn exit(&self) -> Exit {
        match self {
            Self::NotFinite { .. } => Exit::NotFinite,
            _ => self.origin().map_or(Exit::Data, Failure::exit),
        }
    }

    fn origin(&self) -> Option<&dyn Failure> {
        match self {
            Self::Data(e) => Some(e),
            Self::Engine(e) => Some(e),
            Self::Files(e) => Some(e),
            Self::Dist(e) => Some(e),
            Self::Answer { source, .. } => Some(source),
            _ => None,
        }
    }
}
