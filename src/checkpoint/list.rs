//! Checkpoints as they lie in a run, whole or not, to be looked at.

use std::fs;
use std::path::Path;

use serde::Serialize;

use super::find::verified_state;
use super::{TrainState, names, state_of};
use crate::files::io_fault;
use crate::units::Fault;

#[derive(Clone, Debug, Serialize)]
pub struct CheckpointListing {
    pub name: String,
    /// What the run knew of itself; `None` where that cannot be read.
    #[serde(skip)]
    pub state: Option<TrainState>,
    pub step: Option<u64>,
    /// Size of all its files.
    pub bytes: u64,
    /// What is wrong with it; `None` where every file is what its manifest says, and its state fits them.
    pub damage: Option<String>,
}

/// The checkpoints of a run, those with fewer steps first.
pub fn list(run: &Path) -> Result<Vec<CheckpointListing>, Fault> {
    let mut all = names(run)?.into_iter().map(|name| look(&run.join(name))).collect::<Result<Vec<_>, _>>()?;
    all.sort_by(|a, b| (a.step, &b.name).cmp(&(b.step, &a.name)));
    Ok(all)
}

/// One checkpoint: every file of it is read.
pub fn look(dir: &Path) -> Result<CheckpointListing, Fault> {
    let entries = fs::read_dir(dir).map_err(io_fault("read", dir))?.flatten();
    let bytes = entries.map(|entry| entry.metadata().map_or(0, |found| found.len())).sum();
    let state = state_of(dir).ok().flatten();
    let damage = verified_state(dir).err().map(|error| error.to_string());
    let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(CheckpointListing { name, step: state.as_ref().map(|state| state.step), state, bytes, damage })
}
