//! Files without a name: room on a disk for what does not fit into memory. They are gone when they are closed, and with their process in
//! whichever way it ends, so nothing is left behind.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::disk::{self, DiskFile};
use super::{free_space, io_fault, nearest_existing, temporary_beside};
use crate::units::{Bytes, Fault, abridged};

/// A new empty file on the file system where a directory is, or would be.
pub fn unnamed_file(dir: &Path) -> io::Result<DiskFile> {
    let dir = nearest_existing(dir);
    let unnamed = DiskFile::open("scratch", &dir, options().custom_flags(OFlags::TMPFILE.bits().cast_signed()));
    unnamed.or_else(|error| match error.raw_os_error().map(Errno::from_raw_os_error) {
        // What systems say that know no such files.
        Some(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => without_its_name(&dir),
        _ => Err(error),
    })
}

/// A file whose room is reserved before it is used. It is read and written at places, not mapped: a full or failing disk is then an error of the
/// call that meets it, where a mapping would end the process with SIGBUS; and what waits in it doesn't count as the process's resident memory.
#[derive(Debug)]
pub struct Scratch {
    /// As the user has written it, also where it does not exist.
    dir: PathBuf,
    file: DiskFile,
    len: u64,
}

impl Scratch {
    /// An [`unnamed_file`] of a directory.
    pub fn create(dir: &Path) -> Result<Self, Fault> {
        let refused = |error| {
            let fault = io_fault("create a scratch file in", dir)(error);
            if dir.exists() { fault } else { fault.with_hint("make that directory, or name one that exists") }
        };
        Ok(Self { dir: dir.to_owned(), file: unnamed_file(dir).map_err(refused)?, len: 0 })
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
                let free = free_space(&nearest_existing(&self.dir)).unwrap_or_default();
                let dir = abridged(self.dir.display());
                let hint = "make room on that file system or set `grad.scratch_dir` to a directory on another one, and go on with \
                            `kvtune resume`; what was saved before is intact";
                Fault::failed(format!("the scratch files in `{dir}` need {needed} more, and {free} are free there"))
                    .with_hint(hint)
                    .caused_by(source)
            }
            _ => io_fault("reserve room for a scratch file in", &self.dir)(source),
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
        self.file.write_all_at(bytes, offset).map_err(io_fault("write to a scratch file in", &self.dir))
    }

    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        // Not `read`: what is wrong is the disk, not something that a user has given.
        self.file.read_exact_at(bytes, offset).map_err(io_fault("read back a scratch file in", &self.dir))
    }
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    options
}

/// For file systems whose files all have a name at first. Who is killed before it is removed leaves an empty file. NFS shows the file as
/// `.nfs…` until it is closed.
fn without_its_name(dir: &Path) -> io::Result<DiskFile> {
    let path = temporary_beside(&dir.join("scratch"));
    let file = DiskFile::open("scratch", &path, options().create_new(true))?;
    disk::remove_file("scratch", &path)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::super::failpoint::tests::with;
    use super::*;

    #[test]
    fn what_is_written_comes_back_and_nothing_stands_in_the_directory() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().to_owned();
        let made = Scratch::create(&dir.join("not/there/yet")).unwrap();
        let named_at_first = Scratch { file: without_its_name(&dir).unwrap(), dir: dir.clone(), len: 0 };
        for mut scratch in [made, named_at_first] {
            assert_eq!(scratch.grow(5_000, 10_000).unwrap(), Bytes(10_000));
            let found = scratch.file.as_file().metadata().unwrap();
            // On the disk, not only in the length.
            assert!(
                found.blocks() * 512 >= 10_000 && found.len() == 10_000 && found.nlink() == 0 && found.mode() & 0o777 == 0o600,
                "{found:?}"
            );
            scratch.write_at(9_000, &[7; 1000]).unwrap();
            let mut found = [0; 1000];
            scratch.read_at(9_000, &mut found).unwrap();
            assert_eq!((found, scratch.len()), ([7; 1000], Bytes(10_000)));
            assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
        }
    }

    #[test]
    fn a_full_disk_is_told_with_both_figures() {
        let dir = tempfile::tempdir().unwrap();
        let mut scratch = Scratch::create(dir.path()).unwrap();
        // More than any disk has is done without.
        assert_eq!(scratch.grow(4096, 1 << 60).unwrap(), Bytes(4096));
        let error = scratch.grow(1 << 60, 1 << 61).unwrap_err();
        let needed = format!("need {} more, and ", Bytes((1 << 60) - 4096));
        assert!(error.to_string().contains(&needed) && error.io().is_some(), "{error}");
        assert_eq!(scratch.len(), Bytes(4096));
        let error = with("scratch.reserve=enospc:1+", || scratch.grow(8192, 8192)).0.unwrap_err();
        assert!(error.to_string().contains("need 4.0 KiB more, and "), "{error}");
        for (place, words) in [("write", "cannot write to a scratch file in `"), ("read", "cannot read back a scratch file in `")]
        {
            let at = |plan: &str| with(plan, || scratch.write_at(0, &[1]).and_then(|()| scratch.read_at(0, &mut [0]))).0;
            let error = at(&format!("scratch.{place}=eio")).unwrap_err();
            assert!(error.to_string().starts_with(words) && error.exit() == crate::units::Exit::Failed, "{error}");
        }
        assert!(with("scratch.open=eio", || Scratch::create(dir.path())).0.unwrap_err().io().is_some());
    }
}
