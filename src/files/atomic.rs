//! Files and directories that appear whole or not at all, also when the machine stops in between.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufWriter, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use super::disk::{self, DiskFile};
use super::hub::is_blob_of;
use super::io_fault;
use super::open::special;
use crate::units::{Fault, FaultKind, abridged};

pub(super) const MARK: &str = ".tmp-";
const DIGITS: usize = 16;
/// Bytes after which a file that is being written is made durable: the end of a large one then waits for the last of them alone.
const SLICE: usize = 256 << 20;

/// Writes a file whole: into a temporary neighbour, which is made durable and then takes the place of `path`.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), Fault> {
    write_atomic_with(path, |file| file.write_all(bytes))
}

/// Does what [`write_atomic`] does, for contents that are produced piece by piece. A fault inside of an error of `fill` comes back as it is.
pub fn write_atomic_with(path: &Path, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Fault> {
    if let Some(found) = irreplaceable(path) {
        return Err(no_file(path, found));
    }
    let temporary = temporary_beside(path);
    let placed =
        write_new(&temporary, fill).and_then(|()| disk::rename("file", &temporary, path).map_err(io_fault("rename to", path)));
    if let Err(error) = placed {
        // What can't be removed either is in nobody's way; there is already something to report.
        let _ = disk::remove_file("file", &temporary);
        return Err(error);
    }
    sync_dir(parent(path))
}

/// Fails where [`write_atomic`] could not write a file, as far as that can be known before; what stands there is left as it is.
pub fn check_writable(path: &Path) -> Result<(), Fault> {
    if let Some(found) = irreplaceable(path).or_else(|| path.is_dir().then_some("a directory")) {
        return Err(no_file(path, found));
    }
    let temporary = temporary_beside(path);
    write_new(&temporary, |_| Ok(()))?;
    disk::remove_file("file", &temporary).map_err(io_fault("remove", &temporary))
}

/// Does what [`write_atomic_with`] does to a file that the user has named: links stay, and the file behind them is replaced. What is no file, as a
/// device or a pipe, is written into, and so is what this process has open, as `/dev/stdout`: what it prints before and after stays.
pub fn write_named(path: &Path, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Fault> {
    let place = behind_links(path)?;
    if place.is_dir() {
        return Err(no_file(path, "a directory"));
    }
    if !is_open_file(&place) && !fs::metadata(&place).is_ok_and(|found| is_special(&found)) {
        return write_atomic_with(&place, fill);
    }
    if let Some(open) = duplicate(&place) {
        return fill_buffered(File::from(open), path, fill).map(drop);
    }
    let file = DiskFile::open("file", path, OpenOptions::new().append(true)).map_err(io_fault("write", path))?;
    fill_buffered(file, path, fill).map(drop)
}

fn no_file(path: &Path, found: &str) -> Fault {
    let message = format!("`{}` is {found}: expected a file to replace", abridged(path.display()));
    Fault::usage(message, "name a regular file, or one that is not there yet")
}

/// The file that links lead to from a name, were it not there yet.
pub fn behind_links(path: &Path) -> Result<PathBuf, Fault> {
    if let Err(error) = fs::metadata(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(io_fault("write", path)(error));
    }
    let mut place = path.to_path_buf();
    // Links that lead in a circle have failed above.
    while !is_open_file(&place)
        && let Ok(target) = fs::read_link(&place)
    {
        place = parent(&place).join(target);
    }
    Ok(place)
}

/// Whether a name is one of those of open files: what it leads to may have no name, or another one by now.
fn is_open_file(path: &Path) -> bool {
    parent(path).canonicalize().is_ok_and(|dir| dir.starts_with("/proc"))
}

/// A duplicate of standard output or error, if a name as `/proc/self/fd/1` leads there: what is printed beside it goes by the same offset.
fn duplicate(path: &Path) -> Option<OwnedFd> {
    let is_own = parent(path).canonicalize().ok()? == Path::new("/proc/self/fd").canonicalize().ok()?;
    match path.file_name()?.to_str().filter(|_| is_own)? {
        "1" => io::stdout().as_fd().try_clone_to_owned().ok(),
        "2" => io::stderr().as_fd().try_clone_to_owned().ok(),
        _ => None,
    }
}

/// What stands in the place of a file and can't be replaced.
fn irreplaceable(path: &Path) -> Option<&'static str> {
    let is_open = is_open_file(path);
    let found = if is_open { path.metadata().ok()? } else { path.symlink_metadata().ok()? };
    if is_special(&found) { Some(special(found.file_type())) } else { is_open.then_some("an open file") }
}

/// Whether something is neither a file, nor a directory, nor a link, but a device or a pipe: other processes have it by its name.
fn is_special(found: &fs::Metadata) -> bool {
    !(found.is_file() || found.is_dir() || found.is_symlink())
}

fn write_new(path: &Path, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Fault> {
    let open = DiskFile::open("file", path, OpenOptions::new().write(true).create_new(true));
    let mut file = open.map_err(io_fault("create", path))?;
    file.slice = SLICE;
    fill_buffered(file, path, fill)?.sync().map_err(io_fault("sync", path))
}

fn fill_buffered<W: Write>(file: W, path: &Path, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<W, Fault> {
    let failed = |error: io::Error| error.downcast::<Fault>().unwrap_or_else(io_fault("write", path));
    let mut buffer = BufWriter::with_capacity(1 << 20, file);
    fill(&mut buffer).and_then(|()| buffer.flush()).map_err(failed)?;
    Ok(buffer.into_parts().0)
}

pub fn sync_dir(dir: &Path) -> Result<(), Fault> {
    disk::sync_dir("dir", dir).map_err(io_fault("sync", dir))
}

/// Fills a new directory beside `place` and renames it; returns where the one now lies that stood there before. If anything fails, nothing of
/// the attempt stays. The new name is durable after [`sync_dir`] of the parent.
pub fn put_dir(place: &Path, fill: impl FnOnce(&Path) -> Result<(), Fault>) -> Result<Option<PathBuf>, Fault> {
    let staged = temporary_beside(place);
    fill(&staged).and_then(|()| replace_dir(&staged, place)).inspect_err(|_| {
        // The error tells what happened; what is left of the attempt is only in the way.
        let _ = disk::remove_tree("dir", &staged);
    })
}

/// Puts the directory `staged` in the place of `target` beside it, atomically; returns where the one now lies that stood there before. The
/// new name is durable after [`sync_dir`] of the parent.
pub fn replace_dir(staged: &Path, target: &Path) -> Result<Option<PathBuf>, Fault> {
    let failed = io_fault("rename to", target);
    if target.symlink_metadata().is_err() {
        return disk::rename("dir", staged, target).map(|()| None).map_err(failed);
    }
    let replace = || {
        if disk::exchange("dir", staged, target)? {
            return Ok(staged.to_path_buf());
        }
        // Network file systems cannot exchange. Between the two renames the name is missing, never the data.
        let aside = temporary_beside(target);
        disk::rename("dir", target, &aside)?;
        if let Err(error) = disk::rename("dir", staged, target) {
            disk::rename("dir", &aside, target)?;
            return Err(error);
        }
        Ok(aside)
    };
    replace().map(Some).map_err(failed)
}

/// A free name beside `path`, which [`is_temporary`] knows again.
pub fn temporary_beside(path: &Path) -> PathBuf {
    // Every `RandomState` has keys of its own; seeded from the operating system.
    let random = RandomState::new().hash_one(std::process::id());
    let mut name = path.file_name().map_or_else(|| OsString::from("file"), OsString::from);
    name.push(format!("{MARK}{random:0DIGITS$x}"));
    path.with_file_name(name)
}

pub fn is_temporary(name: &str) -> bool {
    name.rsplit_once(MARK).is_some_and(|(before, digits)| {
        !before.is_empty() && digits.len() == DIGITS && digits.bytes().all(|b| b.is_ascii_hexdigit())
    })
}

/// Refuses a directory that is a symbolic link: what is written must land where the user said.
pub fn refuse_symlink(dir: &Path) -> Result<(), Fault> {
    if dir.symlink_metadata().is_ok_and(|found| found.is_symlink()) {
        let message = format!("`{}` is a symbolic link: expected a directory to write into", abridged(dir.display()));
        return Err(Fault::usage(message, "name the directory that the link points to"));
    }
    Ok(())
}

/// Refuses what leads out of `dir` to another name, but for blobs of Hugging Face's cache: no stranger's directory has what is the user's copied.
pub(super) fn refuse_foreign_link(dir: &Path, path: &Path) -> Result<(), Fault> {
    // What can't be followed, its reader refuses.
    let (Ok(home), Ok(target)) = (dir.canonicalize(), path.canonicalize()) else { return Ok(()) };
    if is_blob_of(&home, &target) || target.starts_with(&home) || target.file_name() == path.file_name() {
        return Ok(());
    }
    let (link, target) = (abridged(path.display()), abridged(target.display()));
    let message = format!("`{link}` is a link to `{target}`, which is no part of the model");
    let hint = "put the file itself in the link's place, if it is to go with the model";
    Err(Fault::data(message, hint).of_kind(FaultKind::ForeignLink))
}

pub(super) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::failpoint::tests::with;
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_large_file_is_made_durable_slice_by_slice() {
        let dir = tempfile::tempdir().unwrap();
        let mut options = OpenOptions::new();
        let mut sliced = DiskFile::open("file", &dir.path().join("x"), options.write(true).create_new(true)).unwrap();
        sliced.slice = 10;
        let write = |bytes: &[u8]| with("file.sync=eio:1", || sliced.write_all(bytes));
        let ended = [&[0; 9][..], &[0; 1], &[0; 9], &[0; 30]].map(write).map(|(result, reached)| (result.is_ok(), reached));
        assert_eq!(ended, [(true, false), (false, true), (true, false), (false, true)]);
    }

    #[test]
    fn a_file_is_the_old_or_the_new_one_wherever_a_write_fails() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        for action in ["eio", "enospc", "edquot"] {
            write_atomic(&path, b"old").unwrap();
            for n in 1.. {
                let (result, reached) = with(&format!("any={action}:{n}"), || write_atomic(&path, b"newer"));
                let found = fs::read(&path).unwrap();
                assert_eq!(names(dir.path()), ["x.json"], "{n}");
                if !reached {
                    result.unwrap();
                    assert_eq!(found, b"newer");
                    assert_eq!(n, 6, "open, write, sync, rename, sync of the directory");
                    break;
                }
                assert!(result.is_err() && (found == b"old" || n == 5), "{n}");
                write_atomic(&path, b"old").unwrap();
            }
        }
    }

    #[test]
    fn links_pipes_and_devices_stay_what_they_are() {
        use std::os::unix::fs::{FileTypeExt, symlink};
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("far")).unwrap();
        symlink("far/file", at("one")).unwrap();
        symlink("one", at("two")).unwrap();
        symlink("round", at("round")).unwrap();
        for content in ["new", "newer"] {
            write_named(&at("two"), |out| out.write_all(content.as_bytes())).unwrap();
            assert_eq!((fs::read_to_string(at("far/file")).unwrap(), names(&at("far"))), (content.into(), vec!["file".into()]));
            assert!(at("one").is_symlink() && at("two").is_symlink());
        }
        let error = write_named(&at("round"), |_| Ok(())).unwrap_err();
        assert!(error.hint().is_some_and(|hint| hint.starts_with("the links lead around")), "{error}");
        rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        symlink("pipe", at("to pipe")).unwrap();
        let (pipe, written) = (at("pipe"), at("to pipe"));
        let reader = std::thread::spawn(move || fs::read_to_string(pipe).unwrap());
        write_named(&written, |out| out.write_all(b"through")).unwrap();
        assert_eq!(reader.join().unwrap(), "through");
        write_named(Path::new("/dev/null"), |out| out.write_all(b"gone")).unwrap();
        let full = write_named(Path::new("/dev/full"), |out| out.write_all(b"x")).unwrap_err();
        assert_eq!(full.to_string(), "cannot write `/dev/full`");
        // What is open stays the file that it is, as that of standard output, and what it held.
        fs::write(at("open"), "before, ").unwrap();
        let open = OpenOptions::new().append(true).open(at("open")).unwrap();
        let name = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&open));
        symlink(name, at("to open")).unwrap();
        write_named(&at("to open"), |out| out.write_all(b"and now, ")).unwrap();
        (&open).write_all(b"behind").unwrap();
        assert_eq!(fs::read_to_string(at("open")).unwrap(), "before, and now, behind");
        let name = PathBuf::from(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&open)));
        let error = write_atomic(&name, b"x").unwrap_err();
        assert!(error.to_string().ends_with("is an open file: expected a file to replace"), "{error}");
        let error = write_atomic(&at("pipe"), b"x").unwrap_err();
        assert!(error.to_string().ends_with("is a pipe: expected a file to replace"), "{error}");
        let error = write_named(dir.path(), |out| out.write_all(b"x")).unwrap_err();
        assert!(error.to_string().ends_with("is a directory: expected a file to replace"), "{error}");
        assert!(at("pipe").metadata().unwrap().file_type().is_fifo() && at("to pipe").is_symlink());
    }

    #[test]
    fn directories_are_replaced_and_the_old_one_is_handed_back() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("final");
        for round in 0..2 {
            let staged = temporary_beside(&target);
            fs::create_dir(&staged).unwrap();
            fs::write(staged.join("round"), round.to_string()).unwrap();
            let old = replace_dir(&staged, &target).unwrap();
            assert_eq!(old.is_some(), round == 1);
            assert_eq!(fs::read_to_string(target.join("round")).unwrap(), round.to_string());
            if let Some(old) = old {
                assert_eq!(fs::read_to_string(old.join("round")).unwrap(), "0");
            }
        }
    }

    #[test]
    fn temporary_names_are_known_again_and_others_are_not() {
        let name = temporary_beside(Path::new("run/step-000001"));
        assert!(is_temporary(name.file_name().unwrap().to_str().unwrap()), "{name:?}");
        for other in
            ["step-000001", "x.tmp-", "x.tmp-0123", ".tmp-0123456789abcdef", "x.tmp-0123456789abcdefg", "x.tmp-0123456789abcdeg"]
        {
            assert!(!is_temporary(other), "{other}");
        }
    }

    #[test]
    fn links_are_refused_as_a_place_to_write() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert_eq!(refuse_symlink(&link).unwrap_err().exit(), crate::units::Exit::Usage);
        refuse_symlink(dir.path()).unwrap();
        refuse_symlink(&dir.path().join("new")).unwrap();
    }
}
