//! Compiled kernels on disk, so that a second start need not compile them.
//!
//! A file is used only if it is this user's, nobody else may write to it, and its hash is right; any other is as if it were not there.
//! Keeping them is no more than a saving of time: a folder that cannot be written to is no error.

use std::env;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// Bytes of a hash, which a file begins with.
const HASH: usize = 32;
/// Nothing that is kept is as large.
const MAX_BYTES: u64 = 64 << 20;
/// Bits of a file's mode with which others than its owner may write to it.
const OTHERS_WRITE: u32 = 0o022;

/// What was kept of this kind, found out from all these.
pub(super) fn recall(kind: &str, parts: &[&str]) -> Option<Vec<u8>> {
    read(&folder()?, &name(kind, parts))
}

/// Keeps it for the next start, if that can be done.
pub(super) fn keep(kind: &str, parts: &[&str], bytes: &[u8]) {
    // It would only have saved the next start some tenths of a second.
    let _ = folder().map(|folder| write(&folder, &name(kind, parts), bytes));
}

/// The folder for it: `$KVTUNE_CACHE_DIR`, else `kvtune` in `$XDG_CACHE_HOME`, else `~/.cache/kvtune`.
fn folder() -> Option<PathBuf> {
    let named = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    named("KVTUNE_CACHE_DIR")
        .or_else(|| named("XDG_CACHE_HOME").map(|cache| cache.join("kvtune")))
        .or_else(|| named("HOME").map(|home| home.join(".cache/kvtune")))
        .filter(|folder| folder.is_absolute())
}

/// The name of what was found out from all these: anything else has another name.
fn name(kind: &str, parts: &[&str]) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        // The length tells `ab`, `c` from `a`, `bc`.
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    format!("{kind}-{}", &hasher.finalize().to_hex()[..32])
}

/// What was kept under this name, if it is whole and this user's.
fn read(folder: &Path, name: &str) -> Option<Vec<u8>> {
    let no_link = OFlags::NOFOLLOW.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(no_link).open(folder.join(name)).ok()?;
    let found = file.metadata().ok()?;
    let is_ours = found.uid() == rustix::process::geteuid().as_raw() && found.mode() & OTHERS_WRITE == 0;
    if !found.is_file() || !is_ours || found.len() > MAX_BYTES {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    let (hash, kept) = bytes.split_at_checked(HASH)?;
    (blake3::hash(kept).as_bytes() == hash).then(|| kept.to_vec())
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let random = RandomState::new().hash_one(std::process::id());
    let temporary = folder.join(format!("{name}.tmp-{random:016x}"));
    let fill = |mut file: File| {
        file.write_all(blake3::hash(bytes).as_bytes())?;
        file.write_all(bytes)?;
        fs::rename(&temporary, folder.join(name))
    };
    let done = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary).and_then(fill);
    if done.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    done
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn what_is_kept_comes_back_and_nothing_else_does() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("new/kvtune");
        assert_eq!(read(&folder, "a"), None);
        write(&folder, "a", b"cubin").unwrap();
        assert_eq!(read(&folder, "a"), Some(b"cubin".to_vec()));
        write(&folder, "a", b"another").unwrap();
        assert_eq!(read(&folder, "a"), Some(b"another".to_vec()));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing temporary is left");
        assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);

        let path = folder.join("a");
        let whole = fs::read(&path).unwrap();
        for cut in 0..whole.len() {
            fs::write(&path, &whole[..cut]).unwrap();
            assert_eq!(read(&folder, "a"), None, "{cut} bytes of it");
        }
        for bit in 0..whole.len() * 8 {
            let mut damaged = whole.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &damaged).unwrap();
            assert_eq!(read(&folder, "a"), None, "bit {bit}");
        }
        fs::write(&path, &whole).unwrap();
        assert!(read(&folder, "a").is_some());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(read(&folder, "a"), None, "others may write to it");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        symlink(&path, folder.join("b")).unwrap();
        assert_eq!(read(&folder, "b"), None, "a link");
        fs::create_dir(folder.join("c")).unwrap();
        assert_eq!(read(&folder, "c"), None, "a folder");
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_an_error_and_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(write(&file, "a", b"cubin").is_err());
        fs::create_dir_all(root.path().join("folder/a")).unwrap();
        assert!(write(&root.path().join("folder"), "a", b"cubin").is_err(), "a folder stands in the way");
        assert_eq!(fs::read_dir(root.path().join("folder")).unwrap().count(), 1);
    }

    #[test]
    fn names_tell_all_parts_apart() {
        let names = [&["ab", "c"][..], &["a", "bc"], &["abc"], &["abc", ""], &["ab", "d"]].map(|parts| name("k", parts));
        for (i, one) in names.iter().enumerate() {
            assert!(names[..i].iter().all(|other| other != one) && one.starts_with("k-"));
        }
    }
}
