//! `MANIFEST.json`: the size and hash of every file of a checkpoint, written last.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};

use super::CheckpointError;
use crate::files::{self, FileKind, FilesError};

/// Name of the manifest.
pub(super) const NAME: &str = "MANIFEST.json";

/// Files by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Size and hash of each.
    pub files: BTreeMap<String, FileEntry>,
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Bytes.
    pub size: u64,
    /// BLAKE3 of the content, in hex.
    pub blake3: String,
}

impl Manifest {
    /// Lists the files of a directory.
    pub(super) fn of(dir: &Path) -> Result<Self, CheckpointError> {
        let mut manifest = Self::default();
        for entry in fs::read_dir(dir).map_err(FilesError::io("read", dir))? {
            let path = entry.map_err(FilesError::io("read", dir))?.path();
            let Some(name) = path.file_name().and_then(|n| n.to_str()).filter(|n| *n != NAME) else { continue };
            let size = fs::metadata(&path).map_err(FilesError::io("look at", &path))?.len();
            manifest.files.insert(name.to_owned(), FileEntry { size, blake3: files::hash_file(&path)? });
        }
        Ok(manifest)
    }

    /// Reads the manifest of a directory and checks every file against it.
    pub(super) fn verify(dir: &Path) -> Result<Self, CheckpointError> {
        let path = dir.join(NAME);
        if !path.exists() {
            return Err(CheckpointError::Unfinished { dir: dir.to_owned() });
        }
        let manifest: Self = files::read_json_as(&path, FileKind::Record)?;
        for (name, expected) in &manifest.files {
            let file = dir.join(name);
            let damaged = |what: String| CheckpointError::Damaged { path: file.clone(), what };
            if !matches!(Path::new(name).components().collect::<Vec<_>>()[..], [Component::Normal(_)]) {
                return Err(CheckpointError::Damaged { path, what: format!("`{name}` is not the name of a file in it") });
            }
            let found = fs::metadata(&file).map_err(|_| damaged("it is missing".into()))?.len();
            if found != expected.size {
                return Err(damaged(format!("expected {} bytes, found {found}", expected.size)));
            }
            if files::hash_file(&file)? != expected.blake3 {
                return Err(damaged("its content has changed".into()));
            }
        }
        Ok(manifest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_shortened_or_missing_file_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.bin");
        fs::write(&file, b"12345").unwrap();
        assert!(matches!(Manifest::verify(dir.path()), Err(CheckpointError::Unfinished { .. })));
        let manifest = Manifest::of(dir.path()).unwrap();
        fs::write(dir.path().join(NAME), files::to_json(&manifest)).unwrap();
        assert_eq!(Manifest::verify(dir.path()).unwrap(), manifest);
        fs::write(&file, b"12346").unwrap();
        assert!(Manifest::verify(dir.path()).unwrap_err().to_string().contains("content has changed"));
        fs::write(&file, b"1234").unwrap();
        assert!(Manifest::verify(dir.path()).unwrap_err().to_string().contains("expected 5 bytes, found 4"));
        fs::remove_file(&file).unwrap();
        assert!(Manifest::verify(dir.path()).unwrap_err().to_string().contains("missing"));
    }

    #[test]
    fn a_name_that_leaves_the_directory_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["../a", "/etc/passwd", "a/b"] {
            let entry = FileEntry { size: 1, blake3: String::new() };
            let manifest = Manifest { files: BTreeMap::from([(name.to_owned(), entry)]) };
            fs::write(dir.path().join(NAME), files::to_json(&manifest)).unwrap();
            assert!(Manifest::verify(dir.path()).unwrap_err().to_string().contains("not the name of a file"), "{name}");
        }
    }
}
