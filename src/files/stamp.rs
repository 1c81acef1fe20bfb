//! By how the system lists a file, what was once found out of it is believed later, as the hash of a large one; and the folder for such things.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{FileKind, hash_bytes, hash_file, write_atomic};
use crate::units::Fault;

/// A change that is younger may hide another one: clocks of file systems are no finer, at worst.
const MIN_AGE: Duration = Duration::from_secs(2);

/// A file as the system lists it: while this is the same, so is the content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    pub size: u64,
    device: u64,
    inode: u64,
    /// Seconds since 1970 and nanoseconds. Who writes to a file can set its other times, and not this one.
    changed: (i64, i64),
}

impl Stamp {
    /// The stamp of the file at a path; `None` where the system does not list it.
    pub fn of(path: &Path) -> Option<Self> {
        let found = fs::metadata(path).ok()?;
        let changed = (found.ctime(), found.ctime_nsec());
        Some(Self { size: found.len(), device: found.dev(), inode: found.ino(), changed })
    }

    /// Whether the last change is so long ago that a further one would show: a file that was changed just now may be changed again and look the same.
    pub fn is_old_enough(&self) -> bool {
        self.is_older_than(MIN_AGE)
    }

    fn is_older_than(&self, age: Duration) -> bool {
        let (Ok(seconds), Ok(nanoseconds)) = (u64::try_from(self.changed.0), u32::try_from(self.changed.1)) else { return false };
        let changed = UNIX_EPOCH + Duration::new(seconds, nanoseconds);
        SystemTime::now().duration_since(changed).is_ok_and(|since| since >= age)
    }
}

/// The user's folder for what can be made again; `None` where the environment names none.
pub fn cache_folder() -> Option<PathBuf> {
    let folder = |variable: &str| std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")));
    cache.map(|cache| cache.join("kvtune"))
}

/// Bytes of the least file whose hash is remembered.
const MIN_BYTES: u64 = 1 << 20;

/// The hash of a file's bytes, as [`hash_file`] has it; that of a large file is remembered.
pub fn hash_large_file(path: &Path) -> Result<String, Fault> {
    hash_with(path, cache_folder().map(|cache| cache.join("hashes")).as_deref(), MIN_BYTES, MIN_AGE)
}

fn hash_with(path: &Path, folder: Option<&Path>, least: u64, min_age: Duration) -> Result<String, Fault> {
    let before = Stamp::of(path).filter(|before| before.size >= least);
    let (Some(before), Some(folder)) = (before, folder) else { return hash_file(path) };
    let place = place(folder, path);
    let known: Value = super::read_json_as(&place, FileKind::Note).unwrap_or_default();
    if let Some(hash) = known["hash"].as_str().filter(|_| known["stamp"] == json!(before)) {
        return Ok(hash.to_owned());
    }
    let hash = hash_file(path)?;
    if Stamp::of(path).as_ref() == Some(&before) && before.is_older_than(min_age) && fs::create_dir_all(folder).is_ok() {
        // Where it cannot be remembered it is hashed again.
        let _ = write_atomic(&place, &super::to_json(&json!({ "stamp": before, "hash": hash })));
    }
    Ok(hash)
}

fn place(folder: &Path, path: &Path) -> PathBuf {
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    folder.join(format!("{}.json", &hash_bytes(path.as_os_str().as_encoded_bytes())[..32]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_remembered_until_the_file_is_touched() {
        let dir = tempfile::tempdir().unwrap();
        let (path, folder) = (dir.path().join("weights"), dir.path().join("cache/hashes"));
        let hash = || hash_with(&path, Some(&folder), 4, Duration::ZERO).unwrap();
        fs::write(&path, b"12345").unwrap();
        assert_eq!(hash(), hash_bytes(b"12345"));
        // What is remembered is believed: another content in the record comes back.
        let record = place(&folder, &path);
        let text = fs::read_to_string(&record).unwrap().replace(&hash_bytes(b"12345"), "remembered");
        fs::write(&record, text).unwrap();
        assert_eq!(hash(), "remembered");
        fs::write(&path, b"12346").unwrap();
        assert_eq!(hash(), hash_bytes(b"12346"));
        fs::write(&record, b"{").unwrap();
        assert_eq!(hash(), hash_bytes(b"12346"));
        fs::write(&path, b"123").unwrap();
        assert_eq!(hash(), hash_bytes(b"123"), "a small one");
        assert_eq!(hash_with(&path, None, 0, Duration::ZERO).unwrap(), hash_bytes(b"123"), "nowhere to remember it");
    }
}
