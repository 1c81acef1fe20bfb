//! `MANIFEST.json`: the size and hash of every file of a checkpoint, written last.

use std::collections::BTreeMap;
use std::path::{Component, Path};
use std::{fs, io};

use serde::{Deserialize, Serialize};

use super::state::STATE;
use crate::files::{self, FileKind, io_fault};
use crate::model::{ADAPTER_CONFIG, ADAPTER_TENSORS, MODEL_TENSORS};
use crate::units::{Fault, FaultKind, abridged, quoted};

pub(super) const NAME: &str = "MANIFEST.json";
/// The model card: not listed, as people go on writing it.
pub const CARD: &str = "README.md";
/// Bytes of the longest name that file systems have.
const MAX_NAME: usize = 255;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    pub files: BTreeMap<String, FileEntry>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    pub size: u64,
    /// Of the content, in hexadecimal.
    pub blake3: String,
}

impl Manifest {
    pub(super) fn of(dir: &Path) -> Result<Self, Fault> {
        let mut manifest = Self::default();
        for entry in fs::read_dir(dir).map_err(io_fault("read", dir))? {
            let path = entry.map_err(io_fault("read", dir))?.path();
            let Some(name) = path.file_name().and_then(|n| n.to_str()).filter(|n| ![NAME, CARD].contains(n)) else { continue };
            let size = fs::metadata(&path).map_err(io_fault("look at", &path))?.len();
            manifest.files.insert(name.to_owned(), FileEntry { size, blake3: files::hash_file(&path)? });
        }
        Ok(manifest)
    }

    /// Reads the manifest of a directory and checks every file against it.
    pub(super) fn verify(dir: &Path) -> Result<Self, Fault> {
        let path = dir.join(NAME);
        if !files::is_there(&path) {
            let dir = abridged(dir.display());
            let message = format!("`{dir}` is not a finished checkpoint: it has no `{NAME}`");
            return Err(Fault::data(message, ANOTHER).of_kind(FaultKind::Damaged));
        }
        let manifest: Self = files::read_json_as(&path, FileKind::Record)?;
        manifest.require_all(dir)?;
        for (name, expected) in &manifest.files {
            let is_plain = matches!(Path::new(name).components().collect::<Vec<_>>()[..], [Component::Normal(_)]);
            if !is_plain || name.contains('\0') || name.len() > MAX_NAME {
                let what = format!("`{}` is not the name of a file in it", quoted(name));
                return Err(damaged(&path, &what));
            }
            let file = dir.join(name);
            let damaged = |what: &str| damaged(&file, what);
            let found = match fs::metadata(&file) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(damaged("it is missing")),
                found => found.map_err(io_fault("look at", &file))?.len(),
            };
            if found != expected.size {
                return Err(damaged(&format!("expected {} bytes, found {found}", expected.size)));
            }
            if files::hash_file(&file)? != expected.blake3 {
                return Err(damaged("its content has changed"));
            }
        }
        Ok(manifest)
    }

    /// Fails where it leaves a file out that a checkpoint must have.
    pub(super) fn require(&self, name: &str, dir: &Path) -> Result<(), Fault> {
        if self.files.contains_key(name) {
            return Ok(());
        }
        Err(damaged(&dir.join(NAME), &format!("it does not list `{name}`")))
    }

    /// Fails where it leaves out what every checkpoint has, or a file that would be read. Other programs may put pages of their own beside.
    fn require_all(&self, dir: &Path) -> Result<(), Fault> {
        let weights = if self.files.contains_key(MODEL_TENSORS) { MODEL_TENSORS } else { ADAPTER_TENSORS };
        let config = (weights == ADAPTER_TENSORS).then_some(ADAPTER_CONFIG);
        [STATE, weights].into_iter().chain(config).try_for_each(|name| self.require(name, dir))?;
        for entry in fs::read_dir(dir).map_err(io_fault("read", dir))?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_read = Path::new(&name).extension().is_some_and(|kind| kind == "json" || kind == "safetensors");
            if is_read && name != NAME {
                self.require(&name, dir)?;
            }
        }
        Ok(())
    }
}

const ANOTHER: &str = "use another checkpoint of the run, as `step-000100`";

/// A file of a checkpoint is not what its manifest says.
pub(super) fn damaged(path: &Path, what: &str) -> Fault {
    Fault::data(format!("`{}` is damaged: {what}", abridged(path.display())), ANOTHER).of_kind(FaultKind::Damaged)
}

#[cfg(test)]
mod tests {
    use super::super::state::OPTIMIZER;
    use super::*;

    /// A directory with the files that a checkpoint must have.
    fn place() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in [STATE, OPTIMIZER, ADAPTER_CONFIG, ADAPTER_TENSORS] {
            fs::write(dir.path().join(name), "x").unwrap();
        }
        dir
    }

    #[test]
    fn what_is_read_must_be_listed() {
        let dir = place();
        let verified = |manifest: &Manifest| {
            fs::write(dir.path().join(NAME), files::to_json(manifest)).unwrap();
            Manifest::verify(dir.path()).map_err(|error| error.to_string())
        };
        assert!(verified(&Manifest::default()).unwrap_err().contains("`state.json`"));
        let whole = Manifest::of(dir.path()).unwrap();
        for name in whole.files.keys() {
            let mut lacks = whole.clone();
            lacks.files.remove(name);
            assert!(verified(&lacks).unwrap_err().contains(&format!("does not list `{name}`")));
        }
        fs::write(dir.path().join("README.md"), "of another program").unwrap();
        verified(&whole).unwrap();
        fs::write(dir.path().join("kv_policy.json"), "{}").unwrap();
        assert!(verified(&whole).unwrap_err().contains("does not list `kv_policy.json`"));
        fs::write(dir.path().join(NAME), "").unwrap();
        assert!(matches!(Manifest::verify(dir.path()), Err(error) if super::super::find::is_damage(&error)));
    }

    #[test]
    fn a_changed_shortened_or_missing_file_is_noticed() {
        let dir = place();
        let file = dir.path().join("a.bin");
        fs::write(&file, b"12345").unwrap();
        assert!(Manifest::verify(dir.path()).is_err_and(|error| error.to_string().contains("is not a finished checkpoint")));
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
        let dir = place();
        let whole = Manifest::of(dir.path()).unwrap();
        for name in ["../a", "/etc/passwd", "a/b", "a\0b", &"n".repeat(5000)] {
            let entry = FileEntry { size: 1, blake3: String::new() };
            let mut manifest = whole.clone();
            manifest.files.insert(name.to_owned(), entry);
            fs::write(dir.path().join(NAME), files::to_json(&manifest)).unwrap();
            let words = Manifest::verify(dir.path()).unwrap_err().to_string();
            assert!(words.contains(NAME) && words.contains("not the name of a file"), "{name}: {words}");
            assert!(words.len() < 1000 && !words.contains('\0'), "{words}");
        }
    }
}
