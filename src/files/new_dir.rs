//! A directory that appears whole under a name of its own: staged beside it, and what a killed process has staged before goes.

use std::path::Path;

use super::atomic::{MARK, is_temporary, parent, put_dir, sync_dir};
use super::{DirLock, disk, io_fault, is_there, make_dir};
use crate::units::{Fault, abridged};

/// Does durably what [`put_dir`] does, for a `place` that is empty or not there. The directory exists when it is filled, and what ended processes
/// have left of it goes first.
pub fn put_new_dir(place: &Path, fill: impl FnOnce(&Path) -> Result<(), Fault>) -> Result<(), Fault> {
    let place = std::path::absolute(place).map_err(io_fault("make", place))?;
    let home = parent(&place);
    make_dir(home)?;
    sweep(home, &place)?;
    let replaced = put_dir(&place, |staged| {
        make_dir(staged)?;
        // Until it has its name, nobody sweeps it away.
        let _writing = DirLock::for_reading(staged)?;
        fill(staged)?;
        sync_dir(staged)
    })?;
    if let Some(empty) = replaced {
        std::fs::remove_dir(&empty).map_err(io_fault("remove", &empty))?;
    }
    sync_dir(home)
}

/// Refuses a directory that holds anything, with the hint to choose another `--out`.
pub fn require_unused(dir: &Path) -> Result<(), Fault> {
    if !is_there(dir) {
        return Ok(());
    }
    make_dir(dir)?;
    if std::fs::read_dir(dir).map_err(io_fault("read", dir))?.next().is_none() {
        return Ok(());
    }
    let message = format!("`{}` exists and is not empty", abridged(dir.display()));
    Err(Fault::usage(message, "choose another `--out`, or empty the directory"))
}

/// Removes what processes that have ended have left of `place`.
fn sweep(home: &Path, place: &Path) -> Result<(), Fault> {
    let own = place.file_name().unwrap_or_default().to_string_lossy();
    for entry in std::fs::read_dir(home).map_err(io_fault("read", home))?.flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        let is_left = is_temporary(&name) && name.rsplit_once(MARK).is_some_and(|(before, _)| before == own);
        if is_left
            && entry.file_type().is_ok_and(|kind| kind.is_dir())
            && let Ok(Some(_lock)) = DirLock::for_removal(&path)
        {
            disk::remove_tree("dir", &path).map_err(io_fault("remove", &path))?;
        }
    }
    Ok(())
}
