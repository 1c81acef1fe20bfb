//! Checkpoints are moved out of the way: damaged ones keep their content for a person to look at, and a run that goes on from an earlier
//! one leaves the later ones behind, as they belong to a future that is made anew. No resume takes either for a checkpoint.

use std::path::{Path, PathBuf};

use super::NewestCheckpoint;
use super::commit::{latest, set_latest};
use super::find::{ASIDE, candidates, is_damage};
use crate::files::{self, disk, io_fault};
use crate::units::Fault;

/// Gives the damaged checkpoints of `run` newer than the one that was found another name, but for other formats. Returns each with its new place.
pub fn set_aside(run: &Path, found: &NewestCheckpoint) -> Result<Vec<(PathBuf, PathBuf)>, Fault> {
    let mut moved = Vec::new();
    for (dir, _) in found.skipped.iter().filter(|(_, why)| is_damage(why)) {
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        let numbered = |number| if number < 2 { format!("{name}{ASIDE}") } else { format!("{name}{ASIDE}-{number}") };
        let place = free_place(|number| run.join(numbered(number)));
        disk::rename("checkpoint", dir, &place).map_err(io_fault("set aside", dir))?;
        moved.push((dir.clone(), place));
    }
    if moved.is_empty() {
        return Ok(moved);
    }
    files::sync_dir(run)?;
    let is_gone = |name: String| moved.iter().any(|(dir, _)| dir.file_name().is_some_and(|gone| *gone == *name));
    if latest(run).is_none_or(is_gone)
        && let Some(name) = found.dir.file_name().and_then(|name| name.to_str())
    {
        set_latest(run, name)?;
    }
    Ok(moved)
}

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
fn free_place(numbered: impl Fn(u64) -> PathBuf) -> PathBuf {
    // Numbers do not run out.
    (1..=u64::MAX).map(numbered).find(|place| place.symlink_metadata().is_err()).unwrap_or_default()
}
