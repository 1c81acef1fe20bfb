//! A run that goes on from an earlier checkpoint leaves the later ones behind: they belong to a future that is made anew.

use std::path::{Path, PathBuf};

use super::commit::set_latest;
use super::find::candidates;
use crate::files::{self, disk, io_fault};
use crate::units::Fault;

/// Moves the checkpoints of `run` with more than `step` steps into a directory of their own, `abandoned-N`, where no resume
/// looks for them; `from` becomes the newest. Returns that directory, if there was anything to move.
pub fn abandon(run: &Path, from: &str, step: u64) -> Result<Option<PathBuf>, Fault> {
    let later = || -> Result<Vec<(u64, PathBuf)>, Fault> {
        Ok(candidates(run)?.into_iter().filter(|(other, _)| *other > step).collect())
    };
    if later()?.is_empty() {
        return Ok(None);
    }
    let place = free_place(|number| run.join(format!("abandoned-{number}")));
    files::make_dir(&place)?;
    // From the newest down: a crash in between leaves the newest of the rest, and nothing with a gap before it.
    for (_, dir) in later()? {
        if let Some(name) = dir.file_name() {
            disk::rename("checkpoint", &dir, &place.join(name)).map_err(io_fault("move", &dir))?;
        }
    }
    files::sync_dir(&place)?;
    set_latest(run, from)?;
    Ok(Some(place))
}

/// The first of these places at which nothing stands.
pub(super) fn free_place(numbered: impl Fn(u64) -> PathBuf) -> PathBuf {
    let mut number = 1u64;
    loop {
        let place = numbered(number);
        if place.symlink_metadata().is_err() {
            return place;
        }
        number += 1;
    }
}
