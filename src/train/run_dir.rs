//! What lies in the directory of a run.

use std::path::{Path, PathBuf};

use crate::checkpoint::{self, CheckpointError};
use crate::report::console;

/// Name of the recipe in a run's directory.
pub const RESOLVED_RECIPE: &str = "recipe.resolved.toml";

/// The newest whole checkpoint of a run; what is newer and not whole is told.
pub(super) fn newest(run: &Path) -> Result<PathBuf, CheckpointError> {
    let found = checkpoint::newest(run)?;
    for (dir, why) in &found.skipped {
        console::warning(&format!("skipped `{}`: {why}", dir.display()));
    }
    Ok(found.dir)
}
