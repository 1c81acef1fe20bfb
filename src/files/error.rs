//! What can go wrong with files.

use std::io;
use std::path::{Path, PathBuf};

use crate::units::{Bytes, Exit, Failure};

/// An error of the room `files`.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// The operating system refused.
    #[error("cannot {action} `{}`", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Too little room before the first byte is written.
    #[error("`{}` needs {needed}, but only {free} are free there", path.display())]
    NoSpace {
        /// Where.
        path: PathBuf,
        /// Room needed.
        needed: Bytes,
        /// Room found.
        free: Bytes,
    },
    /// Too little room for what a step leaves on disk until it ends.
    #[error("the scratch files in `{}` need {needed} more, and {free} are free there", dir.display())]
    ScratchFull {
        /// Their directory.
        dir: PathBuf,
        /// Room needed beside what they have.
        needed: Bytes,
        /// Room found.
        free: Bytes,
        /// What the operating system said.
        source: io::Error,
    },
    /// A directory to write into is a symbolic link.
    #[error("`{}` is a symbolic link: expected a directory to write into", path.display())]
    Symlink {
        /// The link.
        path: PathBuf,
    },
    /// Another process works in the directory.
    #[error("`{}` is in use by {}", dir.display(), holder(*.pid))]
    Locked {
        /// The directory.
        dir: PathBuf,
        /// The other process, if it said so.
        pid: Option<u32>,
    },
    /// Not JSON, or not the JSON that was expected.
    #[error("`{}` is not valid JSON: {reason}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        reason: String,
    },
    /// The file ends early.
    #[error("`{}` is truncated: expected {expected} bytes, found {found}", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Length its header asks for.
        expected: u64,
        /// Its length.
        found: u64,
    },
    /// Not a safetensors file.
    #[error("`{}` is not a valid safetensors file: {reason}", path.display())]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A tensor that is not in the file.
    #[error("`{}` has no tensor `{name}`", path.display())]
    NoTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// An adapter directory without an adapter.
    #[error("`{}` holds no PEFT adapter: `{missing}` is missing", dir.display())]
    NoAdapter {
        /// The directory.
        dir: PathBuf,
        /// The file that is missing.
        missing: &'static str,
    },
    /// Settings of an adapter that cannot be honoured, all of them.
    #[error("`{}` asks for what is not supported: {}", path.display(), settings.join(", "))]
    AdapterSettings {
        /// The adapter's config.
        path: PathBuf,
        /// `key = value` each.
        settings: Vec<String>,
    },
    /// Tensors of an adapter that do not fit the model, all of them.
    #[error("`{}` does not fit the model:\n  {}", path.display(), first(differences))]
    AdapterTensors {
        /// The adapter's tensor file.
        path: PathBuf,
        /// One line per tensor.
        differences: Vec<String>,
    },
}

/// As many as a person reads, and how many more there are.
fn first(lines: &[String]) -> String {
    const SHOWN: usize = 12;
    let shown = lines.iter().take(SHOWN).cloned();
    let more = (lines.len() > SHOWN).then(|| format!("and {} more", lines.len() - SHOWN));
    shown.chain(more).collect::<Vec<_>>().join("\n  ")
}

fn holder(pid: Option<u32>) -> String {
    pid.map_or_else(|| "another process".into(), |pid| format!("process {pid}"))
}

impl FilesError {
    /// Whether what lies on disk is wrong or missing, rather than that something could not be written.
    pub fn is_about_content(&self) -> bool {
        match self {
            Self::Io { action, .. } => ["open", "read", "map", "look at"].contains(action),
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
            Self::Io { source, .. } => match source.kind() {
                io::ErrorKind::NotFound if !self.is_about_content() => "check that the directory above it exists".into(),
                io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory => {
                    "something else stands there: check whether a file or a directory is meant".into()
                }
                io::ErrorKind::NotFound => "check the path; paths in a recipe are relative to the recipe's folder".into(),
                io::ErrorKind::PermissionDenied => "check who owns the file and its directory".into(),
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    "make room on that file system and go on with `kvtune resume`; what was saved before is intact".into()
                }
                io::ErrorKind::ReadOnlyFilesystem => "choose an output directory that can be written to".into(),
                _ => return None,
            },
            Self::NoSpace { .. } => {
                "make room on that file system and go on with `kvtune resume`; what was saved before is intact".into()
            }
            Self::ScratchFull { .. } => "make room on that file system or set `grad.scratch_dir` to a directory on another one, and go on \
                 with `kvtune resume`; what was saved before is intact"
                .into(),
            Self::Symlink { .. } => "name the directory that the link points to".into(),
            Self::Locked { .. } => "wait until the other run has ended, stop it, or choose another output directory".into(),
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
            FilesError::io("write", &path)(io::ErrorKind::ReadOnlyFilesystem.into()),
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
