//! What can go wrong with files.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::units::{Bytes, Exit, Failure, FaultKind, abridged, joined, listed, quoted};

#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    #[error("cannot {action} `{}`", abridged(path.display()))]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("`{}` is {found}: expected {expected}", abridged(path.display()))]
    NotRegular { path: PathBuf, found: &'static str, expected: &'static str },
    /// More than is read of such a file.
    #[error("`{}` is too large: {kind} may have {limit} at most", abridged(path.display()))]
    TooLarge {
        path: PathBuf,
        /// What it is read as.
        kind: &'static str,
        limit: Bytes,
    },
    #[error("`{}` is not UTF-8: byte {at} is 0x{byte:02x}", abridged(path.display()))]
    NotText {
        path: PathBuf,
        /// Which byte is wrong, from 1.
        at: usize,
        byte: u8,
    },
    /// Too little room before the first byte is written.
    #[error("`{}` needs {needed}, but only {free} are free there", abridged(path.display()))]
    NoSpace { path: PathBuf, needed: Bytes, free: Bytes },
    /// Too little room for what a step leaves on disk until it ends.
    #[error("the scratch files in `{}` need {needed} more, and {free} are free there", abridged(dir.display()))]
    ScratchFull {
        dir: PathBuf,
        /// Room needed beside what they have.
        needed: Bytes,
        free: Bytes,
        /// What the operating system said.
        source: io::Error,
    },
    /// A directory to write into is a symbolic link.
    #[error("`{}` is a symbolic link: expected a directory to write into", abridged(path.display()))]
    Symlink { path: PathBuf },
    /// A link from a model's directory to something else of the user's.
    #[error("`{}` is a link to `{}`, which is no part of the model", abridged(path.display()), abridged(target.display()))]
    ForeignLink { path: PathBuf, target: PathBuf },
    /// Another process works in the directory.
    #[error("`{}` is in use by {}", abridged(dir.display()), holder(*.pid))]
    Locked {
        dir: PathBuf,
        /// The other process, if it said so.
        pid: Option<u32>,
    },
    #[error("`{}` is not valid JSON: {}", abridged(path.display()), abridged(reason))]
    Json { path: PathBuf, reason: String },
    #[error("`{}` is truncated: expected {expected} bytes, found {found}", abridged(path.display()))]
    Truncated {
        path: PathBuf,
        /// Length its header asks for.
        expected: u64,
        found: u64,
    },
    #[error("`{}` is not a valid safetensors file: {}", abridged(path.display()), abridged(reason))]
    NotSafetensors { path: PathBuf, reason: String },
    #[error("`{}` has no tensor `{}`", abridged(path.display()), quoted(name))]
    NoTensor { path: PathBuf, name: String },
    /// An adapter directory without an adapter.
    #[error("`{}` holds no PEFT adapter: `{missing}` is missing", abridged(dir.display()))]
    NoAdapter { dir: PathBuf, missing: &'static str },
    /// Settings of an adapter that cannot be honoured, all of them.
    #[error("`{}` asks for what is not supported: {}", abridged(path.display()), listed(settings))]
    AdapterSettings {
        path: PathBuf,
        /// Each setting as `key = value`.
        settings: Vec<String>,
    },
    /// Tensors of an adapter that do not fit the model, all of them.
    #[error("`{}` does not fit the model:\n  {}", abridged(path.display()), joined(differences, "\n  "))]
    AdapterTensors { path: PathBuf, differences: Vec<String> },
}

const MAKE_ROOM: &str = "make room on that file system and go on with `kvtune resume`; what was saved before is intact";

/// What to do about an error of the operating system.
pub fn hint_of_io(error: &io::Error) -> Option<&'static str> {
    const LIMIT: &str = "raise the limit of this shell with `ulimit -n`, or close what holds so many files";
    let by_number = error.raw_os_error().and_then(|number| {
        Some(match Errno::from_raw_os_error(number) {
            Errno::LOOP => "the links lead around in a circle: name the file itself",
            Errno::NAMETOOLONG => "a name may have 255 bytes, and a path 4095: choose a shorter one",
            Errno::MFILE | Errno::NFILE => LIMIT,
            Errno::FBIG => "raise the limit of a file's size with `ulimit -f`, and go on with `kvtune resume`; what was saved before is intact",
            Errno::NOMEM | Errno::AGAIN => "raise the limits of memory and of processes (`ulimit -v`, `ulimit -u`)",
            Errno::IO | Errno::STALE => {
                "the disk or its connection fails: look into the system's log, mend it and go on with `kvtune resume`, where a run was \
                 writing; what was saved before is intact"
            }
            Errno::DQUOT => {
                "make room within your quota on that file system, or ask for more, and go on with `kvtune resume`; what was saved before \
                 is intact"
            }
            _ => return None,
        })
    });
    by_number.or_else(|| {
        Some(match error.kind() {
            io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory => {
                "something else stands there: check whether a file or a directory is meant"
            }
            io::ErrorKind::NotFound | io::ErrorKind::InvalidInput => {
                "check the path; paths in a recipe are relative to the recipe's folder"
            }
            io::ErrorKind::PermissionDenied => "check who owns the file and its directory",
            io::ErrorKind::StorageFull => MAKE_ROOM,
            io::ErrorKind::ReadOnlyFilesystem => "choose an output directory that can be written to",
            _ => return None,
        })
    })
}

fn holder(pid: Option<u32>) -> String {
    pid.map_or_else(|| "another process".into(), |pid| format!("process {pid}"))
}

impl FilesError {
    /// Whether what lies on disk is wrong or missing, rather than that something could not be written.
    pub fn is_about_content(&self) -> bool {
        match self {
            Self::Io { action, source, .. } => {
                let is_limit =
                    |number: i32| [Errno::MFILE, Errno::NFILE, Errno::NOMEM].contains(&Errno::from_raw_os_error(number));
                ["open", "read", "map", "look at"].contains(action) && !source.raw_os_error().is_some_and(is_limit)
            }
            Self::NoSpace { .. } | Self::ScratchFull { .. } | Self::Symlink { .. } | Self::Locked { .. } => false,
            _ => true,
        }
    }

    /// For `map_err`: the action and the path of an I/O error.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { action, path, source }
    }
}

impl Failure for FilesError {
    fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound && !self.is_about_content() => {
                "check that the directory above it exists".into()
            }
            Self::Io { source, .. } => return hint_of_io(source).map(str::to_owned),
            Self::NotRegular { .. } => "name a regular file, or write what comes from elsewhere into one first".into(),
            Self::TooLarge { .. } => "check whether it is the file that you mean, and fetch or write it again".into(),
            Self::NotText { .. } => "save it as text in UTF-8".into(),
            Self::NoSpace { .. } => MAKE_ROOM.into(),
            Self::ScratchFull { .. } => "make room on that file system or set `grad.scratch_dir` to a directory on another one, and go on \
                 with `kvtune resume`; what was saved before is intact"
                .into(),
            Self::Symlink { .. } => "name the directory that the link points to".into(),
            Self::ForeignLink { .. } => "put the file itself in the link's place, if it is to go with the model".into(),
            Self::Locked { .. } => "wait until the other process has ended, stop it, or choose another place to write to".into(),
            Self::Json { .. } => "look at the place that the parser names, or fetch the file again".into(),
            Self::Truncated { .. } | Self::NotSafetensors { .. } => "fetch or copy the file again; the copy is damaged".into(),
            Self::NoTensor { .. } => "check that the file belongs to this model".into(),
            Self::NoAdapter { .. } => {
                "give the directory that holds `adapter_config.json` and `adapter_model.safetensors`; pickled `.bin` adapters are \
                 not read: load and save them once with a current `peft`"
                    .into()
            }
            Self::AdapterSettings { .. } => {
                "supported are LoRA and DoRA, with rsLoRA, patterns, chosen layers, `lora_bias` and `bias = \"lora_only\"`".into()
            }
            Self::AdapterTensors { .. } => "check that the adapter was trained for this model".into(),
        })
    }

    fn kind(&self) -> FaultKind {
        match self {
            Self::NotRegular { .. } => FaultKind::NotRegular,
            Self::ForeignLink { .. } => FaultKind::ForeignLink,
            _ => self.origin().map_or(FaultKind::Other, Failure::kind),
        }
    }

    /// What lies on disk is wrong, or writing it failed.
    fn exit(&self) -> Exit {
        match self {
            Self::Symlink { .. } => Exit::Usage,
            _ if self.is_about_content() => Exit::Data,
            _ => Exit::Failed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_a_user_can_cause_has_a_way_out() {
        let path = PathBuf::from("x");
        let (found, expected) = (1, 2);
        let all = [
            FilesError::io("read", &path)(io::ErrorKind::NotFound.into()),
            FilesError::io("make", &path)(io::ErrorKind::NotFound.into()),
            FilesError::io("make", &path)(io::ErrorKind::AlreadyExists.into()),
            FilesError::io("read", &path)(io::ErrorKind::PermissionDenied.into()),
            FilesError::io("write", &path)(io::ErrorKind::StorageFull.into()),
            FilesError::io("write", &path)(Errno::DQUOT.into()),
            FilesError::io("sync", &path)(Errno::IO.into()),
            FilesError::io("write", &path)(io::ErrorKind::ReadOnlyFilesystem.into()),
            FilesError::NotRegular { path: path.clone(), found: "a pipe", expected: "a recipe" },
            FilesError::TooLarge { path: path.clone(), kind: "a recipe", limit: Bytes(1) },
            FilesError::NotText { path: path.clone(), at: 1, byte: 255 },
            FilesError::NoSpace { path: path.clone(), needed: Bytes(2), free: Bytes(1) },
            FilesError::ScratchFull {
                dir: path.clone(),
                needed: Bytes(2),
                free: Bytes(1),
                source: io::ErrorKind::StorageFull.into(),
            },
            FilesError::Symlink { path: path.clone() },
            FilesError::Locked { dir: path.clone(), pid: None },
            FilesError::Json { path: path.clone(), reason: "r".into() },
            FilesError::Truncated { path: path.clone(), expected, found },
            FilesError::NotSafetensors { path: path.clone(), reason: "r".into() },
            FilesError::NoTensor { path: path.clone(), name: "n".into() },
            FilesError::NoAdapter { dir: path.clone(), missing: "m" },
            FilesError::AdapterSettings { path: path.clone(), settings: vec!["a = 1".into()] },
            FilesError::AdapterTensors { path, differences: vec!["missing `a`".into()] },
        ];
        for error in all {
            let hint = error.hint().unwrap_or_else(|| panic!("no hint for: {error}"));
            assert!(!hint.ends_with('.') && hint.starts_with(char::is_lowercase), "{hint}");
            assert!(error.to_string().contains("`x`"), "{error}");
        }
    }
}
