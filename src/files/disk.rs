//! The one way to the disk for what must outlive the process, and for scratch files: what a signal interrupts is tried again, and what a
//! test wants to fail fails.
//!
//! `KVTUNE_DISK_LOG=FILE` has every operation that succeeded written down, a JSON object per line, so that a test can tell what a power cut
//! after any of them would have left. A release writes no such log.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use rustix::fs::{CWD, FallocateFlags, RenameFlags};
use rustix::io::Errno;
use serde_json::{Value, json};

use super::failpoint;
use crate::native::locked;

const LOG: &str = "KVTUNE_DISK_LOG";

/// An open file, of whose operations each may fail.
#[derive(Debug)]
pub struct DiskFile {
    /// The word before the dot in the names of its failpoints.
    whose: &'static str,
    number: u64,
    file: File,
    /// Bytes, written one behind the other, after which they are made durable.
    pub(super) slice: usize,
    unsynced: usize,
}

impl DiskFile {
    pub fn open(whose: &'static str, path: &Path, options: &OpenOptions) -> io::Result<Self> {
        static OPENED: AtomicU64 = AtomicU64::new(0);
        let file = attempt(whose, "open", || options.open(path))?;
        let number = OPENED.fetch_add(1, Ordering::Relaxed);
        record(whose, || json!({ "op": "open", "path": path, "file": number }));
        Ok(Self { whose, number, file, slice: usize::MAX, unsynced: 0 })
    }

    pub fn as_file(&self) -> &File {
        &self.file
    }

    /// Makes the content durable. Never again on the same file after a failure: the kernel may have dropped the pages, and say that all is well.
    pub fn sync(&self) -> io::Result<()> {
        recorded(self.whose, "sync", || self.file.sync_all(), || json!({ "op": "sync", "file": self.number }))
    }

    pub fn set_len(&self, len: u64) -> io::Result<()> {
        let operation = || json!({ "op": "truncate", "file": self.number, "len": len });
        recorded(self.whose, "truncate", || self.file.set_len(len), operation)
    }

    /// Takes room on the disk from `len` on, for `more` bytes. Where the file system can't reserve room, the file grows without.
    pub fn reserve(&self, len: u64, more: u64) -> io::Result<()> {
        attempt(self.whose, "reserve", || match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), len, more) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.file.set_len(len + more),
            done => Ok(done?),
        })
    }

    pub fn write_all_at(&self, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.put(bytes, |bytes| self.file.write_at(bytes, offset)) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => (bytes, offset) = (&bytes[written..], offset + written as u64),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        attempt(self.whose, "read", || self.file.read_exact_at(bytes, offset))
    }

    /// One call of the system. A failpoint strikes in the middle of the bytes, where it does most harm, but a signal before the first.
    fn put(&self, bytes: &[u8], write: impl Fn(&[u8]) -> io::Result<usize>) -> io::Result<usize> {
        let Some(fault) = failpoint::reached(self.whose, "write")? else { return write(bytes) };
        if fault.interrupts() {
            return fault.strike().map(|()| 0);
        }
        let half = write(&bytes[..bytes.len().div_ceil(2)])?;
        fault.strike().map(|()| half)
    }
}

impl Write for DiskFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.put(bytes, |bytes| (&self.file).write(bytes))?;
        // JSON holds a character for each byte.
        let text = || bytes[..written].iter().copied().map(char::from).collect::<String>();
        record(self.whose, || json!({ "op": "write", "file": self.number, "bytes": text() }));
        self.unsynced = self.unsynced.saturating_add(written);
        if self.unsynced >= self.slice {
            self.unsynced = 0;
            self.sync()?;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Gives a file or a directory another name; a file that has it goes.
pub fn rename(whose: &'static str, from: &Path, to: &Path) -> io::Result<()> {
    recorded(whose, "rename", || fs::rename(from, to), || json!({ "op": "rename", "from": from, "to": to }))
}

/// Lets two names trade what they name; `false` where the file system can't.
pub fn exchange(whose: &'static str, one: &Path, other: &Path) -> io::Result<bool> {
    let trade = || match rustix::fs::renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => Ok(false),
        done => Ok(done.map(|()| true)?),
    };
    let done = attempt(whose, "rename", trade)?;
    if done {
        record(whose, || json!({ "op": "exchange", "from": one, "to": other }));
    }
    Ok(done)
}

pub fn make_dir(whose: &'static str, path: &Path) -> io::Result<()> {
    recorded(whose, "make_dir", || fs::create_dir(path), || json!({ "op": "make_dir", "path": path }))
}

pub fn remove_file(whose: &'static str, path: &Path) -> io::Result<()> {
    recorded(whose, "remove", || fs::remove_file(path), || json!({ "op": "remove", "path": path }))
}

/// Removes a directory with all that is in it; a link in it goes, and never what it points to.
pub fn remove_tree(whose: &'static str, path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let remove = if entry.file_type()?.is_dir() { remove_tree } else { remove_file };
        remove(whose, &entry.path())?;
    }
    recorded(whose, "remove_dir", || fs::remove_dir(path), || json!({ "op": "remove", "path": path }))
}

pub fn sync_dir(whose: &'static str, path: &Path) -> io::Result<()> {
    let sync = || File::open(path).and_then(|dir| dir.sync_all());
    recorded(whose, "sync", sync, || json!({ "op": "sync_dir", "path": path }))
}

/// Makes an operation as [`attempt`] does, and writes it down.
fn recorded(whose: &str, what: &str, act: impl FnMut() -> io::Result<()>, operation: impl FnOnce() -> Value) -> io::Result<()> {
    attempt(whose, what, act).inspect(|()| record(whose, operation))
}

/// Makes an operation, again for as long as signals interrupt it.
fn attempt<T>(whose: &str, what: &str, mut act: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        let fault = failpoint::reached(whose, what)?.map_or(Ok(()), |fault| fault.strike());
        match fault.and_then(|()| act()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

/// Writes an operation down where a test asks for it. Scratch files outlive nothing.
fn record(whose: &str, operation: impl FnOnce() -> Value) {
    static OPEN: OnceLock<Option<Mutex<File>>> = OnceLock::new();
    if !cfg!(debug_assertions) {
        return;
    }
    let open = || {
        let file = OpenOptions::new().create(true).append(true).open(std::env::var_os(LOG)?).ok()?;
        Some(Mutex::new(file))
    };
    if let Some(log) = OPEN.get_or_init(open).as_ref().filter(|_| whose != "scratch") {
        // A test that misses lines fails by itself.
        let _ = writeln!(locked(log), "{}", operation());
    }
}

#[cfg(test)]
mod tests {
    use super::super::failpoint::tests::with;
    use super::*;

    #[test]
    fn what_is_interrupted_or_cut_short_is_gone_on_with() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let all = || -> io::Result<Vec<u8>> {
            make_dir("dir", &dir.path().join("d"))?;
            let mut file = DiskFile::open("file", &path, OpenOptions::new().read(true).write(true).create_new(true))?;
            file.write_all(b"0123456789")?;
            file.reserve(10, 10)?;
            file.write_all_at(b"abcdef", 7)?;
            file.set_len(12)?;
            file.sync()?;
            sync_dir("dir", dir.path())?;
            rename("file", &path, &dir.path().join("y"))?;
            rename("file", &dir.path().join("y"), &path)?;
            let mut read = [0; 12];
            file.read_exact_at(&mut read, 0)?;
            remove_tree("dir", &dir.path().join("d"))?;
            remove_file("file", &path)?;
            Ok(read.into())
        };
        for action in ["eintr", "short"] {
            let mut n = 0;
            while with(&format!("any={action}:{}", n + 1), || assert_eq!(all().unwrap(), b"0123456abcde", "{action}, {n}")).1 {
                n += 1;
            }
            // A write that was cut short is a further call.
            assert!(n >= 13, "{n} operations");
        }
        for (action, code) in [("eio", Errno::IO), ("enospc", Errno::NOSPC), ("edquot", Errno::DQUOT)] {
            for n in 1.. {
                let (result, is_reached) = with(&format!("any={action}:{n}+"), all);
                if !is_reached {
                    break;
                }
                assert_eq!(result.unwrap_err().raw_os_error(), Some(code.raw_os_error()), "{action}, {n}");
                let _ = fs::remove_dir(dir.path().join("d"));
                let _ = ["x", "y"].map(|name| fs::remove_file(dir.path().join(name)));
            }
        }
    }
}
