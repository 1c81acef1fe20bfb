//! Hashes of large files, remembered in the user's cache folder for as long as the file is untouched: a second start reads none of them.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::hash::hash_file_on_all_cores;
use super::{FileKind, FilesError, hash_bytes, open_to_read, read_bytes, write_atomic};

/// Smaller files are hashed in no time.
const LEAST: u64 = 1 << 24;

/// Seconds after a change, before which another one may bear the same time.
const SETTLED: i64 = 3;

/// A hash, and what the file was when it had it. Who writes to a file cannot keep the time of its last change.
#[derive(PartialEq, Eq, Serialize, Deserialize)]
struct KnownHash {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    hash: String,
}

/// The hash of a file's bytes, as [`hash_file`](super::hash_file) has it; that of a large file is remembered.
pub fn hash_large_file(path: &Path) -> Result<String, FilesError> {
    hash_with(path, cache_folder().as_deref(), (LEAST, SETTLED))
}

fn hash_with(path: &Path, folder: Option<&Path>, (least, settled): (u64, i64)) -> Result<String, FilesError> {
    let look = || open_to_read(path, FileKind::Data)?.metadata().map_err(FilesError::io("look at", path));
    let before = look()?;
    let Some(place) = folder.filter(|_| before.len() >= least).map(|folder| place(folder, path)) else {
        return hash_file_on_all_cores(path);
    };
    let record = |found: &std::fs::Metadata, hash: String| KnownHash {
        device: found.dev(),
        inode: found.ino(),
        size: found.len(),
        modified: (found.mtime(), found.mtime_nsec()),
        changed: (found.ctime(), found.ctime_nsec()),
        hash,
    };
    let known = read_bytes(&place, FileKind::Note).ok().and_then(|bytes| serde_json::from_slice::<KnownHash>(&bytes).ok());
    if let Some(known) = known
        && record(&before, known.hash.clone()) == known
    {
        return Ok(known.hash);
    }
    let hash = hash_file_on_all_cores(path)?;
    let (was, is) = (record(&before, hash.clone()), record(&look()?, hash.clone()));
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |now| now.as_secs() as i64);
    if was == is
        && is.changed.0 + settled <= now
        && let Some(folder) = folder
        && std::fs::create_dir_all(folder).is_ok()
    {
        // Where it cannot be remembered it is hashed again.
        let _ = write_atomic(&place, &super::to_json(&is));
    }
    Ok(hash)
}

fn place(folder: &Path, path: &Path) -> PathBuf {
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    folder.join(format!("{}.json", &hash_bytes(path.as_os_str().as_encoded_bytes())[..32]))
}

fn cache_folder() -> Option<PathBuf> {
    let folder = |variable: &str| std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")));
    cache.map(|cache| cache.join("kvtune").join("hashes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_remembered_until_the_file_is_touched() {
        let dir = tempfile::tempdir().unwrap();
        let (path, folder) = (dir.path().join("weights"), dir.path().join("cache/hashes"));
        let hash = || hash_with(&path, Some(&folder), (4, 0)).unwrap();
        std::fs::write(&path, b"12345").unwrap();
        assert_eq!(hash(), hash_bytes(b"12345"));
        // What is remembered is believed: another content in the record comes back.
        let record = place(&folder, &path);
        let text = std::fs::read_to_string(&record).unwrap().replace(&hash_bytes(b"12345"), "remembered");
        std::fs::write(&record, text).unwrap();
        assert_eq!(hash(), "remembered");
        std::fs::write(&path, b"12346").unwrap();
        assert_eq!(hash(), hash_bytes(b"12346"));
        std::fs::write(&record, b"{").unwrap();
        assert_eq!(hash(), hash_bytes(b"12346"));
        std::fs::write(&path, b"123").unwrap();
        assert_eq!(hash(), hash_bytes(b"123"), "a small one");
        assert_eq!(hash_with(&path, None, (0, 0)).unwrap(), hash_bytes(b"123"), "nowhere to remember it");
    }
}
