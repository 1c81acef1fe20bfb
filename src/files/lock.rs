//! One process writes into a run directory, and nothing is removed that another one reads.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use super::{FileKind, io_fault, open_to_read, refuse_symlink};
use crate::units::{Fault, FaultKind, abridged};

/// A lock that concerns a directory; given back when dropped, or when the process ends in any way.
#[derive(Debug)]
pub struct DirLock {
    _file: File,
}

impl DirLock {
    /// The file that the writer of a run directory locks. It stays: removed, it could be another file than a second process waits for.
    pub const NAME: &str = ".lock";

    /// The exclusive right to write into an existing run directory; the error says who has it.
    pub fn for_writing(dir: &Path) -> Result<Self, Fault> {
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
            .map_err(io_fault("create", &path))?;
        lock_run(&file, dir)?;
        file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(io_fault("write", &path))?;
        Ok(Self { _file: file })
    }

    /// Fails if another process has the right to write into a run directory. Changes nothing there.
    pub fn refuse_in_use(dir: &Path) -> Result<(), Fault> {
        match open_to_read(&dir.join(Self::NAME), FileKind::Note) {
            // Shared: of two that ask at the same time neither is taken for who writes.
            Ok(file) => told(file.try_lock_shared(), &file, dir),
            Err(_) => Ok(()),
        }
    }

    /// Keeps a directory from being removed while it is read, by a lock on the directory itself; `None` where it is being removed, or is gone.
    /// Where the file system has no such locks, nobody is kept from anything.
    pub fn for_reading(dir: &Path) -> Result<Option<Self>, Fault> {
        let file = match File::open(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(io_fault("open", dir))?,
        };
        if matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)) {
            return Ok(None);
        }
        // It may have been removed, or another put in its place, before it was locked.
        let is_there =
            |of: &std::fs::Metadata| std::fs::metadata(dir).is_ok_and(|there| (there.dev(), there.ino()) == (of.dev(), of.ino()));
        Ok(file.metadata().is_ok_and(|of| is_there(&of)).then_some(Self { _file: file }))
    }

    /// For who is about to remove a directory; `None` while somebody reads it.
    pub fn for_removal(dir: &Path) -> Result<Option<Self>, Fault> {
        let file = File::open(dir).map_err(io_fault("open", dir))?;
        let is_read = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
        Ok((!is_read).then_some(Self { _file: file }))
    }
}

/// Locks a run's file. Who only asks whether it is locked holds it for a moment, which is waited for.
fn lock_run(file: &File, dir: &Path) -> Result<(), Fault> {
    let held = lock_file(file, dir);
    let again = |_| {
        std::thread::sleep(Duration::from_millis(2));
        file.try_lock().is_ok()
    };
    held.or_else(|fault| if fault.kind() == FaultKind::Locked && (0..50).any(again) { Ok(()) } else { Err(fault) })
}

/// Locks an open file until it is closed, for one process; `place` is what it stands for.
pub fn lock_file(file: &File, place: &Path) -> Result<(), Fault> {
    told(file.try_lock(), file, place)
}

fn told(locked: Result<(), TryLockError>, file: &File, dir: &Path) -> Result<(), Fault> {
    match locked {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => {
            let mut text = String::new();
            // The holder may be just about to write its number: then nobody knows it.
            let _ = Read::take(file, 32).read_to_string(&mut text);
            let pid = text.trim().parse::<u32>();
            let holder = pid.map_or_else(|_| "another process".to_owned(), |pid| format!("process {pid}"));
            let fault = Fault::failed(format!("`{}` is in use by {holder}", abridged(dir.display())));
            let hint = "wait until the other process has ended, stop it, or choose another place to write to";
            Err(fault.with_hint(hint).of_kind(FaultKind::Locked))
        }
        Err(TryLockError::Error(error)) => Err(io_fault("lock", dir)(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_is_told_who_holds_the_lock_and_gets_it_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        let held = DirLock::for_writing(dir.path()).unwrap();
        let error = DirLock::for_writing(dir.path()).unwrap_err();
        assert!(error.to_string().ends_with(&format!("in use by process {}", std::process::id())), "{error}");
        assert_eq!(DirLock::refuse_in_use(dir.path()).unwrap_err().kind(), FaultKind::Locked);
        drop(held);
        // Many that look at a run at the same time do not take each other for its writer, and it begins beside them.
        let looks = |_| (0..300).all(|_| DirLock::refuse_in_use(dir.path()).is_ok());
        let begins = |_| DirLock::for_writing(dir.path()).map(drop).is_ok();
        let all = std::thread::scope(|scope| {
            let looking: Vec<_> = (0..4).map(|at| scope.spawn(move || looks(at))).collect();
            looking.into_iter().all(|thread| thread.join().unwrap())
        });
        let begun = std::thread::scope(|scope| {
            let _looking = scope.spawn(move || looks(0));
            (0..100).all(begins)
        });
        assert!(all && begun);
        DirLock::refuse_in_use(dir.path()).unwrap();
        DirLock::for_writing(dir.path()).unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert!(DirLock::for_writing(&link).unwrap_err().to_string().contains("is a symbolic link"));
    }

    #[test]
    fn what_is_read_is_not_removed_and_what_is_removed_is_not_read() {
        let root = tempfile::tempdir().unwrap();
        let (dir, aside) = (root.path().join("d"), root.path().join("e"));
        std::fs::create_dir(&dir).unwrap();
        let readers = [0; 2].map(|_| DirLock::for_reading(&dir).unwrap().unwrap());
        assert!(DirLock::for_removal(&dir).unwrap().is_none());
        drop(readers);
        let remover = DirLock::for_removal(&dir).unwrap().unwrap();
        assert!(DirLock::for_reading(&dir).unwrap().is_none());
        std::fs::rename(&dir, &aside).unwrap();
        assert!(DirLock::for_reading(&dir).unwrap().is_none() && DirLock::for_removal(&dir).is_err());
        drop(remover);
        assert!(DirLock::for_reading(&aside).unwrap().is_some());
    }
}
