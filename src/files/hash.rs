//! BLAKE3 of files, as lower-case hex.

use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use super::{FileKind, io_fault, open_to_read};
use crate::units::Fault;

const BLOCK: u64 = 16 << 20;

/// The hash of a file's bytes, made on all cores; it takes the memory of a block.
pub fn hash_file(path: &Path) -> Result<String, Fault> {
    let mut hasher = blake3::Hasher::new();
    let mut file = open_to_read(path, FileKind::Data)?;
    let mut block = Vec::new();
    loop {
        block.clear();
        (&mut file).take(BLOCK).read_to_end(&mut block).map_err(io_fault("read", path))?;
        if block.is_empty() {
            return Ok(hasher.finalize().to_hex().to_string());
        }
        hasher.update_rayon(&block);
    }
}

/// The hash of a file's length and of its first and last `window` bytes: tells large files apart without reading them whole.
pub fn hash_ends(path: &Path, window: u64) -> Result<String, Fault> {
    let mut file = open_to_read(path, FileKind::Data)?;
    let length = file.metadata().map_err(io_fault("look at", path))?.len();
    let mut hasher = blake3::Hasher::new();
    hasher.update(&length.to_le_bytes());
    for start in [0, length.saturating_sub(window)] {
        file.seek(SeekFrom::Start(start)).map_err(io_fault("read", path))?;
        hasher.update_reader((&file).take(window)).map_err(io_fault("read", path))?;
    }
    Ok(hasher.finalize().to_hex().to_string())
}

pub fn hash_bytes(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

/// The hash of several pieces, each with its length: where one ends and the next begins counts.
pub fn hash_parts<Part: AsRef<[u8]>>(parts: impl IntoIterator<Item = Part>) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        let part = part.as_ref();
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    hasher.finalize().to_hex().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_hashes_as_its_bytes_do() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        for bytes in [vec![], vec![7; 300_000]] {
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(hash_file(&path).unwrap(), hash_bytes(&bytes));
        }
        // The published value of the empty input.
        assert!(hash_bytes(b"").starts_with("af1349b9f5f9a1a6a0404dea36dcc949"));
        assert_eq!(hash_file(dir.path()).unwrap_err().kind(), crate::units::FaultKind::NotRegular);
    }

    #[test]
    fn the_ends_and_the_length_of_a_file_are_seen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let hash = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            hash_ends(&path, 4).unwrap()
        };
        let whole = hash(b"0123456789");
        assert_eq!(hash(b"0123__6789"), whole);
        for other in [&b"1123456789"[..], b"0123456788", b"01234556789", b"012", b""] {
            assert_ne!(hash(other), whole);
        }
    }

    #[test]
    fn pieces_are_told_apart() {
        assert_eq!(hash_parts(["ab", "c"]), hash_parts([&b"ab"[..], b"c"]));
        for other in [&["a", "bc"][..], &["abc"], &["c", "ab"], &["ab", "c", ""]] {
            assert_ne!(hash_parts(other), hash_parts(["ab", "c"]));
        }
    }
}
