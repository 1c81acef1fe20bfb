//! Files that outlive no process: room on a disk for what does not fit into memory.
//!
//! A scratch file is read and written at places, not mapped: a full or failing disk is then an error of the call that meets it, where
//! a mapping would end the process with SIGBUS; and what waits in the file doesn't count as the process's resident memory.
//!
//! Its name carries the process's number and the open file a lock. A lock ends with its process, in whichever way: so the next start in
//! the same directory removes the files that nobody holds, and never one of a process that lives.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::disk::{self, DiskFile};
use super::{free_space, io_fault, make_dir, refuse_symlink};
use crate::native::locked;
use crate::units::{Bytes, Fault, abridged};

const PREFIX: &str = "kvtune-";
const SUFFIX: &str = ".scratch";

/// A file that is removed when it is dropped, or when a later start finds that its process has ended.
#[derive(Debug)]
pub struct Scratch {
    dir: PathBuf,
    path: PathBuf,
    file: DiskFile,
    len: u64,
}

impl Scratch {
    /// A new empty file for `purpose`, a word, in a directory that is made if need be and where what ended processes have left goes.
    pub fn create(dir: &Path, purpose: &str) -> Result<Self, Fault> {
        refuse_symlink(dir)?;
        loop {
            if !dir.exists() {
                make_dir(dir)?;
                made().insert(dir.to_owned());
            }
            if dir == temporary_path() {
                keep_to_oneself(dir)?;
            }
            remove_stale(dir)?;
            if let Some(scratch) = Self::locked(dir, purpose).inspect_err(|_| leave(dir))? {
                return Ok(scratch);
            }
        }
    }

    /// The directory for those who have no place for such files: below the system's for temporary files, and the same each time, so that
    /// what a killed process has left there is removed by the next. It goes with the last file in it.
    pub fn temporary_dir() -> PathBuf {
        let dir = temporary_path();
        made().insert(dir.clone());
        dir
    }

    /// Removes what processes that have ended left in the system's directory for temporary files.
    pub fn clean_temporary() {
        let dir = temporary_path();
        let is_own =
            fs::symlink_metadata(&dir).is_ok_and(|found| found.is_dir() && found.uid() == rustix::process::getuid().as_raw());
        // What can't be removed is in nobody's way; and a directory that is in use stays.
        if is_own && remove_stale(&dir).is_ok() {
            let _ = fs::remove_dir(dir);
        }
    }

    /// Removes what processes have left in a directory that have ended, for who makes no file there. No directory is nothing.
    pub fn clean(dir: &Path) -> Result<(), Fault> {
        if !dir.exists() {
            return Ok(());
        }
        refuse_symlink(dir)?;
        remove_stale(dir)
    }

    /// `None` where another start has taken the file for a stale one before it was locked, or has removed the empty directory.
    fn locked(dir: &Path, purpose: &str) -> Result<Option<Self>, Fault> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!("{PREFIX}{purpose}-{}-{number}{SUFFIX}", std::process::id()));
        let file = match DiskFile::open("scratch", &path, OpenOptions::new().read(true).write(true).create_new(true)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound && !dir.exists() => return Ok(None),
            Err(error) => return Err(io_fault("create", &path)(error)),
        };
        match file.as_file().try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => {
                let _ = disk::remove_file("scratch", &path);
                return Err(io_fault("lock", &path)(error));
            }
        }
        let has_a_name = file.as_file().metadata().map_err(io_fault("inspect", &path))?.nlink() > 0;
        Ok(has_a_name.then(|| Self { dir: dir.to_owned(), path, file, len: 0 }))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it takes on the disk.
    pub fn len(&self) -> Bytes {
        Bytes(self.len)
    }

    /// Makes the file longer, with room on the disk for all of it: up to `best`, or where there is no room for that up to `least`.
    /// Returns the new length. Where the file system can't reserve room, writing takes it.
    pub fn grow(&mut self, least: u64, best: u64) -> Result<Bytes, Fault> {
        let reserve = || self.reserve(best).map(|()| best).or_else(|_| self.reserve(least).map(|()| least));
        self.len = reserve().map_err(|source| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                let needed = Bytes(least.saturating_sub(self.len));
                let free = free_space(&self.dir).unwrap_or_default();
                let dir = abridged(self.dir.display());
                let hint = "make room on that file system or set `grad.scratch_dir` to a directory on another one, and go on with \
                            `kvtune resume`; what was saved before is intact";
                Fault::failed(format!("the scratch files in `{dir}` need {needed} more, and {free} are free there"))
                    .with_hint(hint)
                    .caused_by(source)
            }
            _ => io_fault("reserve room for", &self.path)(source),
        })?;
        Ok(self.len())
    }

    fn reserve(&self, len: u64) -> io::Result<()> {
        self.file.reserve(self.len, len.saturating_sub(self.len)).inspect_err(|_| {
            // What was reserved before the disk was full is of no use.
            let _ = self.file.set_len(self.len);
        })
    }

    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.file.write_all_at(bytes, offset).map_err(io_fault("write", &self.path))
    }

    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        // Not `read`: what is wrong is the disk, not something that a user has given.
        self.file.read_exact_at(bytes, offset).map_err(io_fault("read back", &self.path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What can't be removed now is removed at the next start.
        let _ = disk::remove_file("scratch", &self.path);
        leave(&self.dir);
    }
}

/// A directory that was made for scratch files goes with the last of them; a user's own stays.
fn leave(dir: &Path) {
    if made().contains(dir) && fs::remove_dir(dir).is_ok() {
        made().remove(dir);
    }
}

fn made() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    static MADE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    locked(&MADE)
}

fn temporary_path() -> PathBuf {
    std::env::temp_dir().join(format!("kvtune-{}", rustix::process::getuid().as_raw()))
}

/// In a directory that all users share a name can be taken by another: who owns it could exchange what is in it.
fn keep_to_oneself(dir: &Path) -> Result<(), Fault> {
    let owner = fs::metadata(dir).map_err(io_fault("inspect", dir))?.uid();
    if owner != rustix::process::getuid().as_raw() {
        let message = format!("it belongs to the user of number {owner}");
        return Err(io_fault("use", dir)(io::Error::new(io::ErrorKind::PermissionDenied, message)));
    }
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).map_err(io_fault("protect", dir))
}

/// Removes the scratch files in `dir` that no living process holds.
fn remove_stale(dir: &Path) -> Result<(), Fault> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io_fault("look into", dir)(error)),
    };
    for entry in entries.flatten() {
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if !is_file || !is_scratch(&entry.file_name()) {
            continue;
        }
        // Its process may have removed it meanwhile, or another start; and who may not open it has not made it.
        let Ok(file) = OpenOptions::new().read(true).write(true).open(entry.path()) else { continue };
        if file.try_lock().is_ok() {
            let removed = disk::remove_file("scratch", &entry.path());
            if let Err(error) = removed
                && error.kind() != io::ErrorKind::NotFound
            {
                return Err(io_fault("remove", &entry.path())(error));
            }
        }
    }
    Ok(())
}

fn is_scratch(name: &OsStr) -> bool {
    name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)).is_some_and(|middle| {
        let mut parts = middle.rsplit('-');
        let is_number = |part: Option<&str>| part.is_some_and(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()));
        is_number(parts.next()) && is_number(parts.next()) && parts.next().is_some_and(|purpose| !purpose.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::super::failpoint::tests::with;
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_written_comes_back_and_nothing_stays() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("deep/scratch");
        let mut one = Scratch::create(&dir, "one").unwrap();
        let two = Scratch::create(&dir, "two").unwrap();
        assert_eq!(one.grow(5_000, 10_000).unwrap(), Bytes(10_000));
        // On the disk, not only in the length.
        assert!(fs::metadata(one.path()).unwrap().blocks() * 512 >= 10_000);
        one.write_at(9_000, &[7; 1000]).unwrap();
        let mut found = [0; 1000];
        one.read_at(9_000, &mut found).unwrap();
        assert_eq!((found, one.len()), ([7; 1000], Bytes(10_000)));
        assert_eq!(names(&dir).len(), 2);
        drop(one);
        assert_eq!(names(&dir), [two.path().file_name().unwrap().to_str().unwrap()]);
        drop(two);
        assert!(!dir.exists() && dir.parent().unwrap().exists());
    }

    #[test]
    fn files_that_nobody_holds_go_and_all_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let mine = ["kvtune-undo-123-0.scratch", "kvtune-layer-checkpoints-99-12.scratch"];
        let others = ["notes.txt", "kvtune-x.scratch", "kvtune-undo-12a-0.scratch", "kvtune-7-0.scratch", "undo-1-1.scratch"];
        for name in mine.iter().chain(&others) {
            fs::write(dir.path().join(name), "x").unwrap();
        }
        fs::create_dir(dir.path().join("kvtune-undo-5-5.scratch")).unwrap();
        Scratch::clean(&dir.path().join("nowhere")).unwrap();
        let before = Scratch::create(dir.path(), "before").unwrap();
        fs::write(dir.path().join(mine[0]), "x").unwrap();
        Scratch::clean(dir.path()).unwrap();
        assert!(before.path().exists() && !dir.path().join(mine[0]).exists());
        drop(before);
        // A directory that was there before stays, whatever becomes of its files.
        let held = Scratch::create(dir.path(), "held").unwrap();
        let second = Scratch::create(dir.path(), "second").unwrap();
        let found = names(dir.path());
        for name in mine {
            assert!(!found.contains(&name.to_owned()), "{found:?}");
        }
        assert_eq!(found.len(), others.len() + 1 + 2, "{found:?}");
        drop((held, second));
        assert_eq!(names(dir.path()).len(), others.len() + 1);
    }

    #[test]
    fn a_full_disk_is_told_with_both_figures_and_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("scratch");
        let mut scratch = Scratch::create(&dir, "x").unwrap();
        // More than any disk has is done without.
        assert_eq!(scratch.grow(4096, 1 << 60).unwrap(), Bytes(4096));
        let error = scratch.grow(1 << 60, 1 << 61).unwrap_err();
        let needed = format!("need {} more, and ", Bytes((1 << 60) - 4096));
        assert!(error.to_string().contains(&needed) && error.io().is_some(), "{error}");
        assert_eq!(scratch.len(), Bytes(4096));
        let error = with("scratch.reserve=enospc:1+", || scratch.grow(8192, 8192)).0.unwrap_err();
        assert!(error.to_string().contains("need 4.0 KiB more, and "), "{error}");
        for (place, words) in [("write", "cannot write `"), ("read", "cannot read back `")] {
            let at = |plan: &str| with(plan, || scratch.write_at(0, &[1]).and_then(|()| scratch.read_at(0, &mut [0]))).0;
            let error = at(&format!("scratch.{place}=eio")).unwrap_err();
            assert!(error.to_string().starts_with(words) && error.exit() == crate::units::Exit::Failed, "{error}");
        }
        drop(scratch);
        assert!(with("scratch.open=eio", || Scratch::create(&dir, "x")).0.unwrap_err().io().is_some());
        assert!(!dir.exists());
    }

    #[test]
    fn links_are_refused_as_a_place_for_them() {
        let root = tempfile::tempdir().unwrap();
        let link = root.path().join("link");
        std::os::unix::fs::symlink(root.path(), &link).unwrap();
        for refused in [Scratch::create(&link, "x").map(drop), Scratch::clean(&link)] {
            assert_eq!(refused.unwrap_err().exit(), crate::units::Exit::Usage);
        }
    }
}
