//! What lies in the directory of a run.

use std::path::{Path, PathBuf};

use crate::checkpoint;
use crate::report::console;
use crate::units::Fault;

/// Name of the recipe in a run's directory.
pub const RESOLVED_RECIPE: &str = "recipe.resolved.toml";

/// The newest whole checkpoint of a run. What is newer and not whole is told, and set aside where it is damaged.
pub(super) fn newest(run: &Path) -> Result<PathBuf, Fault> {
    let found = checkpoint::newest(run)?;
    let places = checkpoint::set_aside(run, &found)?;
    for (dir, why) in &found.skipped {
        let place = places.iter().find(|(from, _)| from == dir).map(|(_, place)| format!("; it is now `{}`", place.display()));
        console::warning(&format!("skipped `{}`: {why}{}", dir.display(), place.unwrap_or_default()));
    }
    Ok(found.dir)
}
