//! What can go wrong with a policy file, and what its test finds.

use std::path::PathBuf;

use crate::engine::EngineError;
use crate::files::FilesError;
use crate::model::ModelError;
use crate::recipe::RecipeError;
use crate::units::{Exit, Failure, abridged, quoted};
use crate::verify::VerifyError;

/// An error of a policy file or of its test.
#[derive(Debug, thiserror::Error)]
pub enum ConformanceError {
    /// The file can't be read or written.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// What the file says of the cache is not a cache.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The log can't be walked over.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// The base can't be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// There is no policy file.
    #[error("there is no `kv_policy.json` in `{dir}`", dir = abridged(dir.display()))]
    Missing { dir: PathBuf },
    /// Another file, or one of a later version.
    #[error("`{path}` is {found}, expected {expected}", path = abridged(path.display()), found = quoted(found))]
    Format {
        path: PathBuf,
        /// What it says that it is.
        found: String,
        expected: String,
    },
    /// What the file says does not fit the model, or itself.
    #[error("`{key}` in `{path}` is {found}, expected {expected}", path = abridged(path.display()), found = quoted(found))]
    Unfit { path: PathBuf, key: &'static str, found: String, expected: String },
    /// Another token left than in the recording, or at another time.
    #[error("the cache departs from `{path}`: {what}", path = abridged(path.display()))]
    Departs { path: PathBuf, what: String },
}

impl Failure for ConformanceError {
    fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Missing { .. } => "name a checkpoint or an export that `kvtune` has written".into(),
            Self::Format { .. } => "read it with the version of kvtune that wrote it".into(),
            Self::Unfit { .. } => "the file must belong to the model that is tested: take it from its checkpoint again".into(),
            Self::Departs { .. } => {
                "the file was recorded in the dtype that it names: in narrow ones, other devices and merged weights may decide between near \
                 scores otherwise"
                    .into()
            }
            _ => return self.origin()?.hint(),
        })
    }

    fn exit(&self) -> Exit {
        match self {
            Self::Departs { .. } => Exit::Failed,
            _ => self.origin().map_or(Exit::Data, Failure::exit),
        }
    }

    fn origin(&self) -> Option<&dyn Failure> {
        match self {
            Self::Files(e) => Some(e),
            Self::Recipe(e) => Some(e),
            Self::Engine(e) => Some(e),
            Self::Verify(e) => Some(e),
            Self::Model(e) => Some(e),
            _ => None,
        }
    }
}
