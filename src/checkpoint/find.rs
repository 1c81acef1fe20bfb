//! Checkpoints are found again: the newest valid one of a run, and what saves that were cut short have left.

use std::cmp::Reverse;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tch::Tensor;

use super::manifest::{self, Manifest, damaged};
use super::state::{BEST, FINAL, FORMAT_VERSION, OPTIMIZER, STATE, step_directory};
use super::{SaveKind, TrainState};
use crate::files::{self, DirLock, FileKind, TensorFile, disk, io_fault};
use crate::model::{ADAPTER_CONFIG, ADAPTER_TENSORS, EXTRA_TENSORS, GATE_TENSORS, MODEL_TENSORS};
use crate::recipe::TrainedWeights;
use crate::store;
use crate::units::{Fault, FaultKind, abridged};

/// Suffix of the name of a damaged checkpoint.
pub(super) const ASIDE: &str = ".damaged";

#[derive(Debug)]
pub struct NewestCheckpoint {
    pub dir: PathBuf,
    /// Newer ones that do not count, and why.
    pub skipped: Vec<(PathBuf, Fault)>,
}

/// Reads a checkpoint whose manifest verifies: what is trained, by the names of its file, and the state of the training.
pub fn load(dir: &Path) -> Result<(Vec<(String, Tensor)>, TrainState), Fault> {
    let state = verified_state(dir)?;
    let name = if holds(dir) == Some(TrainedWeights::All) { MODEL_TENSORS } else { ADAPTER_TENSORS };
    let mut parameters = store::load_tensors(&TensorFile::open(&dir.join(name))?)?;
    if files::is_there(&dir.join(EXTRA_TENSORS)) {
        parameters.extend(store::load_tensors(&TensorFile::open(&dir.join(EXTRA_TENSORS))?)?);
    }
    Ok((parameters, state))
}

/// The optimiser's tensors of a checkpoint that was loaded. `final` has none: they are in the checkpoint of the same step.
pub fn load_optimizer(dir: &Path) -> Result<Vec<(String, Tensor)>, Fault> {
    let tensors = |dir: &Path| store::load_tensors(&TensorFile::open(&dir.join(OPTIMIZER))?);
    if files::is_there(&dir.join(OPTIMIZER)) {
        return tensors(dir);
    }
    let place = dir.with_file_name(step_directory(state(dir)?.step));
    let damaged = |why: String| {
        let what = format!("`{}` goes on with the optimiser's state in it: {why}", dir.display());
        damaged(&place, &what)
    };
    let (of_step, own) = (Manifest::verify(&place).map_err(|error| damaged(error.to_string()))?, Manifest::verify(dir)?);
    if [MODEL_TENSORS, ADAPTER_TENSORS, EXTRA_TENSORS, GATE_TENSORS]
        .iter()
        .any(|name| own.files.get(*name) != of_step.files.get(*name))
    {
        return Err(damaged("its weights are others".into()));
    }
    tensors(&place)
}

/// Which weights a directory holds: those of an adapter, whoever saved it, or all, as a checkpoint of a run; `None` for another one.
pub fn holds(dir: &Path) -> Option<TrainedWeights> {
    if dir.join(ADAPTER_CONFIG).exists() {
        return Some(TrainedWeights::Adapter);
    }
    // A model directory is a checkpoint only with what a run leaves beside it.
    (dir.join(MODEL_TENSORS).exists() && dir.join(STATE).exists()).then_some(TrainedWeights::All)
}

/// The names of a run's checkpoints, finished or not.
pub fn names(run: &Path) -> Result<Vec<String>, Fault> {
    let name = |dir: PathBuf| Some(dir.file_name()?.to_str()?.to_owned());
    let named = directories(run)?.into_iter().filter(|dir| dir.join(STATE).exists()).filter_map(name);
    Ok(named.filter(|name| !files::is_temporary(name) && !is_aside(name)).collect())
}

fn is_aside(name: &str) -> bool {
    name.split_once(ASIDE).is_some_and(|(_, number)| number.is_empty() || number.starts_with('-'))
}

/// What a run knew of itself at a checkpoint; nothing where another program saved it.
pub fn state_of(dir: &Path) -> Result<Option<TrainState>, Fault> {
    if dir.join(STATE).exists() { state(dir).map(Some) } else { Ok(None) }
}

/// Checks a directory against its manifest. An adapter that another program saved has none, and passes.
pub fn check(dir: &Path) -> Result<(), Fault> {
    let is_ours = [manifest::NAME, STATE].iter().any(|name| dir.join(name).exists());
    if is_ours { verified_state(dir).map(drop) } else { Ok(()) }
}

/// The valid checkpoint of `run` with the most steps; those that are damaged are reported, never removed.
pub fn newest(run: &Path) -> Result<NewestCheckpoint, Fault> {
    let mut skipped = Vec::new();
    for (_, dir) in candidates(run)? {
        match verified_state(&dir) {
            Ok(_) => return Ok(NewestCheckpoint { dir, skipped }),
            Err(why) if is_damage(&why) || why.kind() == FaultKind::OtherVersion => skipped.push((dir, why)),
            Err(why) => return Err(why),
        }
    }
    let reasons: Vec<String> = skipped.iter().map(|(dir, why)| format!("\n  skipped `{}`: {why}", dir.display())).collect();
    let reasons = reasons.concat();
    let message = format!("`{}` has no valid checkpoint{reasons}", abridged(run.display()));
    let none = Fault::data(message, "begin the run again with another `--out`, or remove this directory first");
    Err(if skipped.is_empty() { none.of_kind(FaultKind::NoCheckpoint) } else { none })
}

/// The directories of `run` that may be checkpoints and the steps they claim, those with the most first.
pub(super) fn candidates(run: &Path) -> Result<Vec<(u64, PathBuf)>, Fault> {
    let mut found: Vec<(u64, PathBuf)> = directories(run)?.into_iter().filter_map(|dir| Some((step_hint(&dir)?, dir))).collect();
    found.sort_by_cached_key(|(step, dir)| (Reverse(*step), rank(dir)));
    Ok(found)
}

/// Removes what saves have left that were cut short, and returns the names.
pub fn clean_leftovers(run: &Path) -> Result<Vec<PathBuf>, Fault> {
    let mut removed = Vec::new();
    for entry in fs::read_dir(run).map_err(io_fault("read", run))?.flatten() {
        let path = entry.path();
        if !entry.file_name().to_str().is_some_and(files::is_temporary) {
            continue;
        }
        // Not `is_dir`, which would follow a link.
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            disk::remove_file("file", &path).map_err(io_fault("remove", &path))?;
        } else if !remove_unread(&path)? {
            continue;
        }
        removed.push(path);
    }
    Ok(removed)
}

/// Refuses links in the places of `best` and `final`: a save would put itself in their stead, and remove what they lead to.
pub fn refuse_links(run: &Path) -> Result<(), Fault> {
    [BEST, FINAL].into_iter().try_for_each(|name| files::refuse_symlink(&run.join(name)))
}

pub(super) fn remove_unread(dir: &Path) -> Result<bool, Fault> {
    let Some(_lock) = DirLock::for_removal(dir)? else { return Ok(false) };
    disk::remove_tree("checkpoint", dir).map_err(io_fault("remove", dir))?;
    Ok(true)
}

/// The checkpoints of a run whose state can be read, for retention.
pub(super) fn saved_in(run: &Path) -> Vec<(PathBuf, TrainState)> {
    let saved = |dir: PathBuf| {
        step_hint(&dir)?;
        let state = state(&dir).ok()?;
        let is_step = matches!(state.kind, SaveKind::Regular | SaveKind::Intermediate);
        is_step.then_some((dir, state))
    };
    directories(run).unwrap_or_default().into_iter().filter_map(saved).collect()
}

fn directories(run: &Path) -> Result<Vec<PathBuf>, Fault> {
    let entries = fs::read_dir(run).map_err(io_fault("read", run))?;
    Ok(entries.flatten().map(|e| e.path()).filter(|p| p.is_dir()).collect())
}

/// The step of a directory that may be a checkpoint: by its name, or for `best` and `final` by its state.
fn step_hint(dir: &Path) -> Option<u64> {
    let name = dir.file_name()?.to_str()?;
    match name.strip_prefix("step-") {
        Some(digits) => digits.parse().ok(),
        // One that cannot be read is looked at first, so that it is reported.
        None if [BEST, FINAL].contains(&name) => Some(state(dir).map_or(u64::MAX, |s| s.step)),
        None => None,
    }
}

/// Among checkpoints of one step `final` goes first, as it tells that the run has ended, and `best` last, as the save due then may be missing.
fn rank(dir: &Path) -> u8 {
    match dir.file_name().and_then(|name| name.to_str()) {
        Some(FINAL) => 0,
        Some(BEST) => 2,
        _ => 1,
    }
}

fn state(dir: &Path) -> Result<TrainState, Fault> {
    let path = dir.join(STATE);
    // Before the rest, which another format may not have.
    let parts: Value = files::read_json_as(&path, FileKind::Record)?;
    if let Some(found) = parts["format_version"].as_u64().filter(|&found| found != u64::from(FORMAT_VERSION)) {
        let message = format!("`{}` has checkpoint format {found}, expected {FORMAT_VERSION}", abridged(dir.display()));
        return Err(Fault::data(message, "read it with the version of kvtune that wrote it").of_kind(FaultKind::OtherVersion));
    }
    files::read_json_as(&path, FileKind::Record)
}

pub(super) fn verified_state(dir: &Path) -> Result<TrainState, Fault> {
    let manifest = Manifest::verify(dir)?;
    let state = state(dir)?;
    if state.kind != SaveKind::Final {
        manifest.require(OPTIMIZER, dir)?;
    }
    let name = dir.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let Some(what) = state.contradiction(name) else { return Ok(state) };
    let message = format!("`{}` can't be what this run has saved: {what}", dir.join(STATE).display());
    Err(Fault::data(message, "restore what was changed, or move this checkpoint out of the run and go on from another"))
}

/// Whether a checkpoint is not as it was written. What can't be judged is no damage: a file that may not be opened may be whole.
pub(super) fn is_damage(error: &Fault) -> bool {
    matches!(error.kind(), FaultKind::Damaged | FaultKind::NotRegular | FaultKind::ForeignLink)
}

/// Hashes an adapter's tensors and its settings: what it is, whatever it is called.
pub fn adapter_hash(dir: &Path) -> Result<String, Fault> {
    let extra = Some(EXTRA_TENSORS).filter(|name| files::is_there(&dir.join(name)));
    let parts = [ADAPTER_TENSORS, ADAPTER_CONFIG].into_iter().chain(extra).map(|name| files::hash_file(&dir.join(name)));
    Ok(files::hash_parts(parts.collect::<Result<Vec<_>, _>>()?))
}
