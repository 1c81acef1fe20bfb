//! One process per run directory.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::path::Path;

use super::{FileKind, FilesError, open_to_read, refuse_symlink};

/// The exclusive right to write into a run directory; given back when dropped, or when the process ends in any way.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
}

impl RunLock {
    /// The lock's file in the run directory. It stays: removed, it could be another file than the one that a second process waits
    /// for.
    pub const NAME: &str = ".lock";

    /// Takes the lock of an existing directory, or says who has it.
    pub fn acquire(dir: &Path) -> Result<Self, FilesError> {
        refuse_symlink(dir)?;
        let path = dir.join(Self::NAME);
        refuse_symlink(&path)?;
        // Not truncated: the file may be another process's, with its number inside.
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(FilesError::io("create", &path))?;
        lock(&file, dir)?;
        file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(FilesError::io("write", &path))?;
        Ok(Self { _file: file })
    }

    /// Fails if another process has the lock of a directory. Changes nothing there.
    pub fn refuse_held(dir: &Path) -> Result<(), FilesError> {
        match open_to_read(&dir.join(Self::NAME), FileKind::Note) {
            Ok(file) => lock(&file, dir),
            Err(_) => Ok(()),
        }
    }
}

/// Locks an open file until it is closed.
fn lock(file: &File, dir: &Path) -> Result<(), FilesError> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => {
            let mut text = String::new();
            // The holder may be just about to write its number: then nobody knows it.
            let _ = Read::take(file, 32).read_to_string(&mut text);
            Err(FilesError::Locked { dir: dir.to_path_buf(), pid: text.trim().parse().ok() })
        }
        Err(TryLockError::Error(error)) => Err(FilesError::io("lock", dir)(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_is_told_who_holds_the_lock_and_gets_it_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        let held = RunLock::acquire(dir.path()).unwrap();
        match RunLock::acquire(dir.path()) {
            Err(FilesError::Locked { pid, .. }) => assert_eq!(pid, Some(std::process::id())),
            other => panic!("{other:?}"),
        }
        assert!(matches!(RunLock::refuse_held(dir.path()), Err(FilesError::Locked { .. })));
        drop(held);
        RunLock::refuse_held(dir.path()).unwrap();
        RunLock::acquire(dir.path()).unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert!(matches!(RunLock::acquire(&link), Err(FilesError::Symlink { .. })));
    }
}
