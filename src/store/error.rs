//! What can go wrong between files and tensors.

use std::path::PathBuf;

use crate::files::FilesError;
use crate::units::{Exit, Failure, abridged, quoted};

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A file could not be read or written.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// A tensor of a type that is not used here.
    #[error("`{name}` in `{}` is {found}, expected one of F64, F32, F16, BF16, I64, I32, U8, BOOL", abridged(path.display()), name = quoted(name), found = quoted(found))]
    Dtype { path: PathBuf, name: String, found: String },
    /// Tensors are to wait in a file, and nothing says where.
    #[error("no directory is given for scratch files")]
    NoScratchDir,
    #[error("libtorch, with `{name}`: {reason}", name = quoted(name), reason = abridged(reason))]
    Torch { name: String, reason: String },
}

impl Failure for StoreError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Dtype { .. } => Some("save the tensor as one of these types; quantised models are not read".into()),
            Self::NoScratchDir => Some("give the recipe `grad.scratch_dir`, or an `output_dir` for a default".into()),
            _ => self.origin()?.hint(),
        }
    }

    fn exit(&self) -> Exit {
        match self {
            Self::NoScratchDir => Exit::Usage,
            _ => self.origin().map_or(Exit::Data, Failure::exit),
        }
    }

    fn origin(&self) -> Option<&dyn Failure> {
        match self {
            Self::Files(e) => Some(e),
            _ => None,
        }
    }
}
