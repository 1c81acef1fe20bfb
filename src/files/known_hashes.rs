//! Hashes of large files, remembered in the user's cache folder for as long as the file is untouched: a second start reads none of them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::stamp::{SETTLED, Stamp, cache_folder};
use super::{FileKind, hash_bytes, hash_file, write_atomic};
use crate::units::Fault;

const LEAST: u64 = 1 << 20;

#[derive(PartialEq, Eq, Serialize, Deserialize)]
struct KnownHash {
    stamp: Stamp,
    hash: String,
}

/// The hash of a file's bytes, as [`hash_file`] has it; that of a large file is remembered.
pub fn hash_large_file(path: &Path) -> Result<String, Fault> {
    hash_with(path, cache_folder().map(|cache| cache.join("hashes")).as_deref(), LEAST, SETTLED)
}

fn hash_with(path: &Path, folder: Option<&Path>, least: u64, settled: Duration) -> Result<String, Fault> {
    let before = Stamp::of(path).filter(|before| before.size >= least);
    let (Some(before), Some(folder)) = (before, folder) else { return hash_file(path) };
    let place = place(folder, path);
    let known = super::read_json_as::<KnownHash>(&place, FileKind::Note).ok();
    if let Some(known) = known.filter(|known| known.stamp == before) {
        return Ok(known.hash);
    }
    let hash = hash_file(path)?;
    if Stamp::of(path).as_ref() == Some(&before) && before.is_older_than(settled) && std::fs::create_dir_all(folder).is_ok() {
        // Where it cannot be remembered it is hashed again.
        let _ = write_atomic(&place, &super::to_json(&KnownHash { stamp: before, hash: hash.clone() }));
    }
    Ok(hash)
}

fn place(folder: &Path, path: &Path) -> PathBuf {
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
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
        assert_eq!(hash_with(&path, None, 0, Duration::ZERO).unwrap(), hash_bytes(b"123"), "nowhere to remember it");
    }
}
