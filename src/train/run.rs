//! The story of a run: steps, validation, saving, and an end in good order.

use std::fs;
use std::path::Path;

use super::build::{self, SCRATCH};
use super::error::no_signals;
use super::run_dir::newest;
use super::saved_split::{SPLIT, SavedSplit};
use super::sealed_recipe::write_recipe;
use super::watch::RunWatch;
use super::{Interrupt, RESOLVED_RECIPE, Start, TrainError, Trainer};
use crate::checkpoint::SaveKind;
use crate::files::{self, RunLock};
use crate::model::ModelConfig;
use crate::native::give_free_memory_back;
use crate::recipe::{OnNonFinite, Recipe};
use crate::report::metrics::StepMetrics;
use crate::report::summary::RunSummary;
use crate::units::{Fault, abridged};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Finished,
    /// A signal arrived; the last step is saved.
    Interrupted(i32),
}

/// How a run ended, and what is to be said of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    pub outcome: Outcome,
    /// Its memory by part, where it was watched.
    pub memory: Option<String>,
    /// How it went; the first rank says so for all.
    pub summary: Option<RunSummary>,
}

/// Begins a run in `dir`, which must be empty or not exist.
pub fn run(recipe: &Recipe, dir: &Path, start: Start<'_>) -> Result<Ended, TrainError> {
    // Before anything is loaded or made: what is wrong with the place or the recipe leaves nothing behind.
    let is_first = start.world.is_first();
    if is_first {
        require_unused(dir)?;
    }
    build::check_max_seq_length(recipe, &ModelConfig::load(&recipe.model)?)?;
    let mut trainer = Trainer::new(recipe, dir, start)?;
    let _lock = trainer.ranks.first("making the directory of the run", || make(&trainer, dir))?;
    begin(&mut trainer, start.interrupt)
}

/// Makes the directory of a run, and writes down what it begins with.
fn make(trainer: &Trainer, dir: &Path) -> Result<RunLock, TrainError> {
    files::make_dir(dir)?;
    let lock = RunLock::acquire(dir)?;
    // Again: another run may have begun here while this one was loading.
    require_unused_by_others(dir)?;
    build::clean_scratch(dir)?;
    // The recipe last: where it is, the run has begun, and has its split.
    SavedSplit::write(&trainer.data, dir)?;
    write_recipe(&trainer.recipe, &dir.join(RESOLVED_RECIPE))?;
    Ok(lock)
}

/// From before the first step to the end.
pub(super) fn begin(trainer: &mut Trainer, interrupt: &Interrupt) -> Result<Ended, TrainError> {
    interrupt.watch_for_stops().map_err(no_signals)?;
    let mut watch = RunWatch::begin(trainer, None, interrupt)?;
    if trainer.recipe.eval.initial {
        match trainer.validate(&mut watch) {
            Ok(validation) => watch.validated_first(validation.as_ref())?,
            Err(error) if error.is_given_up() => {
                trainer.ranks.listen()?;
                return interrupted(trainer, &watch);
            }
            Err(error) => return Err(error),
        }
    }
    if trainer.recipe.train.on_non_finite == OnNonFinite::Rollback {
        // There is always something to go back to.
        watch.saved(trainer.save(SaveKind::Intermediate)?);
    }
    go_on(trainer, &mut watch)
}

/// Refuses a directory with anything in it; says so if another process is at work there.
fn require_unused(dir: &Path) -> Result<(), TrainError> {
    files::refuse_symlink(dir)?;
    RunLock::refuse_held(dir)?;
    require_unused_by_others(dir)
}

/// A lock, scratch files, a split without a recipe, and files that were never finished are what is left of a start that was ended before it had
/// anything to keep.
fn require_unused_by_others(dir: &Path) -> Result<(), TrainError> {
    let Ok(entries) = fs::read_dir(dir) else { return Ok(()) };
    let counts = |name: &str| ![RunLock::NAME, SCRATCH, SPLIT].contains(&name) && !files::is_temporary(name);
    if entries.flatten().any(|entry| entry.file_name().to_str().is_none_or(counts)) {
        let hint = if dir.join(super::RESOLVED_RECIPE).exists() {
            format!("choose another `--out`, or go on with `kvtune resume {}`", dir.display())
        } else {
            "choose another `--out`, or empty the directory".to_owned()
        };
        return Err(Fault::usage(format!("the output directory `{}` is not empty", abridged(dir.display())), hint).into());
    }
    Ok(())
}

pub(super) fn go_on(trainer: &mut Trainer, watch: &mut RunWatch) -> Result<Ended, TrainError> {
    // Reading and tokenising may have taken more than a step does, on other threads.
    give_free_memory_back();
    loop {
        // A step whose validation was given up is made, and its line is not whole.
        let made = match watch.takes_unvalidated() {
            Some(metrics) => StepEnd::Step(Box::new(metrics)),
            None if trainer.step() >= trainer.schedule.num_steps() => break,
            None => step(trainer, watch)?,
        };
        let StepEnd::Step(metrics) = made else {
            if matches!(made, StepEnd::GoneBack) {
                continue;
            }
            trainer.ranks.listen()?;
            if trainer.saved_step() < Some(trainer.step()) && trainer.step() > 0 {
                watch.saved(trainer.save(SaveKind::Intermediate)?);
            }
            return interrupted(trainer, watch);
        };
        let validation = match trainer.is_eval_due().then(|| trainer.validate(watch)).transpose() {
            Err(error) if error.is_given_up() => {
                trainer.owes_validation = true;
                trainer.ranks.listen()?;
                None
            }
            Err(error) => {
                trainer.owes_validation = true;
                watch.stepped(*metrics, None)?;
                // What cannot be saved either is not what this is about.
                if let Ok(dir) = trainer.save(trainer.save_due().unwrap_or(SaveKind::Intermediate)) {
                    watch.saved(dir);
                }
                return Err(error);
            }
            Ok(validation) => validation.flatten(),
        };
        // The line is on disk before the checkpoint: after a crash in between, the resume takes it back.
        watch.stepped(*metrics, validation.as_ref())?;
        if validation.is_some_and(|validation| validation.is_best) {
            trainer.save(SaveKind::Best)?;
        }
        let due = trainer.save_due();
        let is_asked = trainer.ranks.takes_save() || trainer.ranks.signal().is_some();
        if let Some(kind) = due.or(is_asked.then_some(SaveKind::Intermediate)) {
            watch.saved(trainer.save(kind)?);
        }
        if trainer.ranks.signal().is_some() {
            return interrupted(trainer, watch);
        }
    }
    // What the optimiser holds stays in a checkpoint of the step.
    if trainer.saved_step() < Some(trainer.step()) {
        watch.saved(trainer.save(trainer.save_due().unwrap_or(SaveKind::Intermediate))?);
    }
    // `final` comes last: where it is, nothing is missing.
    let summary = watch.end(trainer, "finished")?;
    watch.saved(trainer.save(SaveKind::Final)?);
    Ok(Ended { outcome: Outcome::Finished, memory: trainer.memory_by_part(), summary })
}

/// What became of a step.
enum StepEnd {
    /// It is made, or left out.
    Step(Box<StepMetrics>),
    /// The run is back at its last checkpoint.
    GoneBack,
    /// It was given up as it was asked for; the one before stands.
    GivenUp,
}

fn step(trainer: &mut Trainer, watch: &mut RunWatch) -> Result<StepEnd, TrainError> {
    let error = match trainer.advance(watch).and_then(|metrics| trainer.check_if_built_on().map(|()| metrics)) {
        Ok(metrics) => return Ok(StepEnd::Step(Box::new(metrics))),
        Err(error) if error.is_given_up() => return Ok(StepEnd::GivenUp),
        Err(error) => error,
    };
    let why = error.to_string();
    let lost = trainer.skipped.leave_out(error, OnNonFinite::Rollback, &trainer.recipe.train)?;
    // The first rank sets aside what is damaged, before the others look.
    let found = trainer.ranks.first("going back to a checkpoint", || Ok(newest(&trainer.dir)?))?;
    let newest = found.map_or_else(|| newest(&trainer.dir), Ok)?;
    trainer.load(&newest)?;
    trainer.load_optimizer(&newest)?;
    watch.gone_back(trainer, &format!("{why}: back to `{}`, and without step {lost}", newest.display()))?;
    Ok(StepEnd::GoneBack)
}

/// The end of a run that was asked to stop; what is to be saved is saved.
fn interrupted(trainer: &Trainer, watch: &RunWatch) -> Result<Ended, TrainError> {
    let summary = watch.end(trainer, &format!("interrupted after step {}", trainer.step()))?;
    let signal = trainer.ranks.signal().unwrap_or_default();
    Ok(Ended { outcome: Outcome::Interrupted(signal), memory: trainer.memory_by_part(), summary })
}
