//! Errors of the operating system: which file they are about, what to do, and the exit code.

use std::io;
use std::path::Path;

use rustix::io::Errno;

use crate::units::{Exit, Fault, FaultKind, abridged};

pub(super) const MAKE_ROOM: &str =
    "make room on that file system and go on with `kvtune resume`; what was saved before is intact";

/// For `map_err`: what was tried, as a verb, and with which file. What can't be read is an error of the data, what can't be written is none.
pub fn io_fault(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Fault {
    let message = format!("cannot {action} `{}`", abridged(path.display()));
    move |error| {
        let errno = error.raw_os_error().map(Errno::from_raw_os_error);
        let is_limit = matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM));
        let is_content = ["open", "read", "map", "look at"].contains(&action) && !is_limit;
        let hint = match error.kind() {
            io::ErrorKind::NotFound if !is_content => Some("check that the directory above it exists"),
            _ => hint_of_io(&error),
        };
        let fault = Fault::new(if is_content { Exit::Data } else { Exit::Failed }, message);
        let fault = if is_content && errno == Some(Errno::IO) { fault.of_kind(FaultKind::Damaged) } else { fault };
        hint.into_iter().fold(fault, Fault::with_hint).caused_by(error)
    }
}

pub fn hint_of_io(error: &io::Error) -> Option<&'static str> {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    Some(match (errno, error.kind()) {
        (Some(Errno::LOOP), _) => "the links lead around in a circle: name the file itself",
        (Some(Errno::NAMETOOLONG), _) => "a name may have 255 bytes, and a path 4095: choose a shorter one",
        (Some(Errno::MFILE | Errno::NFILE), _) => {
            "raise the limit of this shell with `ulimit -n`, or close what holds so many files"
        }
        (Some(Errno::FBIG), _) => {
            "raise the limit of a file's size with `ulimit -f`, and go on with `kvtune resume`; what was saved before is intact"
        }
        (Some(Errno::NOMEM | Errno::AGAIN), _) => "raise the limits of memory and of processes (`ulimit -v`, `ulimit -u`)",
        (Some(Errno::IO | Errno::STALE), _) => {
            "the disk or its connection fails: look into the system's log, mend it and go on with `kvtune resume`, where a run was \
             writing; what was saved before is intact"
        }
        (Some(Errno::DQUOT), _) => {
            "make room within your quota on that file system, or ask for more, and go on with `kvtune resume`; what was saved before \
             is intact"
        }
        (_, io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory) => {
            "something else stands there: check whether a file or a directory is meant"
        }
        (_, io::ErrorKind::NotFound | io::ErrorKind::InvalidInput) => {
            "check the path: in a recipe it is relative to the recipe's folder, on the command line to the working directory"
        }
        (_, io::ErrorKind::PermissionDenied) => "check who owns the file and its directory",
        (_, io::ErrorKind::StorageFull) => MAKE_ROOM,
        (_, io::ErrorKind::ReadOnlyFilesystem) => "choose a directory that can be written to",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_of_the_system_that_a_user_can_cause_has_a_way_out_and_an_exit_code() {
        let cases: [(&str, io::Error, Exit, &str); 11] = [
            ("read", io::ErrorKind::NotFound.into(), Exit::Data, "check the path"),
            ("make", io::ErrorKind::NotFound.into(), Exit::Failed, "check that the directory above"),
            ("make", io::ErrorKind::AlreadyExists.into(), Exit::Failed, "something else stands there"),
            ("read", io::ErrorKind::PermissionDenied.into(), Exit::Data, "check who owns"),
            ("write", io::ErrorKind::StorageFull.into(), Exit::Failed, "make room"),
            ("write", Errno::DQUOT.into(), Exit::Failed, "make room within your quota"),
            ("sync", Errno::IO.into(), Exit::Failed, "the disk or its connection fails"),
            ("look at", Errno::IO.into(), Exit::Data, "the disk or its connection fails"),
            ("open", Errno::MFILE.into(), Exit::Failed, "raise the limit"),
            ("map", Errno::NOMEM.into(), Exit::Failed, "raise the limits"),
            ("write", io::ErrorKind::ReadOnlyFilesystem.into(), Exit::Failed, "choose a directory"),
        ];
        for (action, error, exit, words) in cases {
            let fault = io_fault(action, Path::new("x"))(error);
            let hint = fault.hint().unwrap_or_else(|| panic!("no hint for: {fault}"));
            assert!(hint.starts_with(words) && !hint.ends_with('.'), "{action}: {hint}");
            assert_eq!((fault.to_string(), fault.exit()), (format!("cannot {action} `x`"), exit), "{:?}", fault.io());
        }
    }
}
