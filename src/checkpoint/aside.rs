//! Damaged checkpoints are set aside: they keep their content for a person to look at, and no resume takes them for one.

use super::find::is_damage;
use std::path::{Path, PathBuf};

use super::NewestCheckpoint;
use super::abandon::free_place;
use super::commit::{latest, set_latest};
use super::find::ASIDE;
use crate::files::{self, disk, io_fault};
use crate::units::Fault;

/// Gives the damaged checkpoints of `run` that are newer than the one that was found another name. Returns each with its new place; one
/// of another format stays where it is.
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
