//! Going on with a run: the checkpoint, and what may differ in the recipe.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::run::{begin, go_on};
use super::run_dir::newest;
use super::saved_split::SavedSplit;
use super::sealed_recipe::{check_recipe, write_recipe};
use super::watch::RunWatch;
use super::{Ended, Outcome, RESOLVED_RECIPE, Start, TrainError, Trainer, build};
use crate::checkpoint::{self, CheckpointError, FINAL, SaveKind};
use crate::files::{ReadLock, RunLock};
use crate::recipe::{Recipe, Weights};
use crate::report::console;

/// A checkpoint and the run it belongs to.
#[derive(Clone, Debug)]
pub struct FoundCheckpoint {
    /// The run's directory.
    pub run: PathBuf,
    /// The checkpoint's.
    pub dir: PathBuf,
    /// What it holds.
    pub holds: Weights,
    /// Keeps it from being removed by a run that goes on meanwhile.
    _reading: Arc<ReadLock>,
}

/// The checkpoint that `path` means: itself, or the newest of a run.
pub fn find_checkpoint(path: &Path) -> Result<FoundCheckpoint, TrainError> {
    if let Some(holds) = checkpoint::holds(path) {
        let reading = ReadLock::share(path)?;
        checkpoint::check(path)?;
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let run = absolute.parent().unwrap_or(path).to_owned();
        if let Ok(recipe) = resolved_recipe(&run) {
            check_recipe(&recipe)?;
        }
        let reading = reading.ok_or_else(|| TrainError::Gone { path: path.to_owned() })?;
        return Ok(FoundCheckpoint { run, dir: path.to_owned(), holds, _reading: reading.into() });
    }
    check_recipe(&resolved_recipe(path)?)?;
    // The run may go on meanwhile, and remove the one that was found before it is held.
    for _ in 0..8 {
        let found = checkpoint::newest(path)?;
        if let Some(reading) = ReadLock::share(&found.dir)? {
            for (dir, why) in &found.skipped {
                console::warning(&format!("skipped `{}`: {why}", dir.display()));
            }
            // One that holds neither is looked at as an adapter, which says what is missing.
            let holds = checkpoint::holds(&found.dir).unwrap_or(Weights::Adapter);
            return Ok(FoundCheckpoint { run: path.to_owned(), dir: found.dir, holds, _reading: reading.into() });
        }
    }
    Err(TrainError::Gone { path: path.to_owned() })
}

/// The recipe of the run in `dir`.
pub fn resolved_recipe(dir: &Path) -> Result<PathBuf, TrainError> {
    let path = dir.join(RESOLVED_RECIPE);
    if path.exists() { Ok(path) } else { Err(TrainError::NoRun { path: dir.to_owned() }) }
}

/// The checkpoint of a run that the user names: one of its own, not a path to somewhere else.
fn named(run: &Path, name: &str) -> Result<PathBuf, TrainError> {
    let mut known = checkpoint::names(run)?;
    if known.iter().any(|k| k == name) {
        return Ok(run.join(name));
    }
    known.sort();
    let expected = if known.is_empty() { "none, as nothing is saved yet".to_owned() } else { known.join(", ") };
    Err(TrainError::NoCheckpoint { run: run.to_owned(), name: name.to_owned(), expected })
}

/// Goes on with the run in `dir`, from the newest checkpoint or the one named `from`.
pub fn resume(
    dir: &Path,
    from: Option<&str>,
    overrides: &[String],
    Start { device, interrupt, profiles_memory }: Start<'_>,
) -> Result<Ended, TrainError> {
    let path = resolved_recipe(dir)?;
    let _lock = RunLock::acquire(dir)?;
    let is_sealed = check_recipe(&path)?;
    let began = Recipe::load(&path, &[])?.recipe;
    let recipe = Recipe::load(&path, overrides)?.recipe;
    let differences = began.changes_refused_on_resume(&recipe);
    if !differences.is_empty() {
        return Err(TrainError::ChangedRecipe { differences });
    }
    for leftover in checkpoint::clean_leftovers(dir)? {
        console::note(&format!("removed `{}`, left by a save that was cut short", leftover.display()));
    }
    build::clean_scratch(dir)?;
    let from = from.map(|name| name.trim_end_matches('/'));
    let start = start(dir, from)?;
    let mut trainer = Trainer::new(recipe, dir, device, profiles_memory)?;
    SavedSplit::check(&trainer.data, dir, &trainer.recipe.model.path)?;
    let kind = start.as_ref().map(|start| trainer.load(start)).transpose()?;
    check_records(&trainer, &path, is_sealed, start.is_some())?;
    if kind == Some(SaveKind::Final) && is_complete(&trainer) {
        checkpoint::retain(dir, trainer.recipe.checkpoint.intermediate_save_keep)?;
        let (made, asked) = (trainer.step(), trainer.schedule.num_steps());
        console::note(&format!("nothing to do: {made} steps are made, the recipe asks for {asked}"));
        return Ok(Ended { outcome: Outcome::Finished, memory: None });
    }
    if !overrides.is_empty() || !is_sealed {
        write_recipe(&trainer.recipe, &path)?;
    }
    let Some(start) = start else {
        console::note("no checkpoint was written yet: beginning again");
        return begin(&mut trainer, interrupt);
    };
    if let Some(name) = from
        && let Some(aside) = checkpoint::abandon(dir, name, trainer.step())?
    {
        console::note(&format!("moved the later checkpoints to `{}`", aside.display()));
    }
    console::note(&format!("resuming after step {} from `{}`", trainer.step(), start.display()));
    interrupt.watch_for_stops().map_err(TrainError::Signals)?;
    let step = trainer.step();
    let mut watch = RunWatch::begin(&mut trainer, Some(step), interrupt)?;
    // The best is saved first: a crash may have come between it and the save that was due at the same step.
    if kind == Some(SaveKind::Best)
        && let Some(due) = trainer.save_due()
    {
        watch.saved(&trainer.save(due)?);
    }
    go_on(&mut trainer, &mut watch, interrupt)
}

/// What the run has written beside its checkpoints must fit the one that was loaded. What an earlier version wrote can't be checked.
fn check_records(trainer: &Trainer, recipe: &Path, is_sealed: bool, is_loaded: bool) -> Result<(), TrainError> {
    if !is_loaded {
        return Ok(());
    }
    trainer.kept_metrics()?;
    match (is_sealed, trainer.unchecked_metrics) {
        (false, Some(_)) => Err(TrainError::ChangedFile { path: recipe.to_owned() }),
        (_, None) => {
            console::note(
                "an earlier version saved this checkpoint: whether recipe and metrics are as it left them can't be checked",
            );
            Ok(())
        }
        _ => Ok(()),
    }
}

/// The checkpoint to start from; none if the run ended before its first was written.
fn start(run: &Path, from: Option<&str>) -> Result<Option<PathBuf>, TrainError> {
    if let Some(name) = from {
        return named(run, name).map(Some);
    }
    match newest(run) {
        Ok(dir) => Ok(Some(dir)),
        Err(CheckpointError::None { skipped, .. }) if skipped.is_empty() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Whether a run whose `final` was loaded has ended in good order, so that there is nothing left to write.
fn is_complete(trainer: &Trainer) -> bool {
    let has_all_steps = trainer.step() >= trainer.schedule.num_steps();
    has_all_steps && checkpoint::latest(&trainer.dir).is_some_and(|name| name == FINAL)
}
