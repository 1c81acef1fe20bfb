//! The story of a run: steps, validation, saving, and an end in good order.

use std::fs;
use std::path::Path;

use super::build;
use super::callback::RunCallback;
use super::saved_split::{SPLIT, SavedSplit};
use super::saving::newest;
use super::sealed_recipe::write_recipe;
use super::step::leave_out;
use super::{Interrupt, RESOLVED_RECIPE, Start, Trainer};
use crate::checkpoint::SaveKind;
use crate::files::{self, DirLock};
use crate::model::ModelConfig;
use crate::native::{give_free_memory_back, peak_resident};
use crate::recipe::{OnNonFinite, Recipe};
use crate::report::metrics::StepMetrics;
use crate::report::summary::RunSummary;
use crate::units::{Exit, Fault, FaultKind, abridged, shell_word};

#[derive(Clone, Debug, PartialEq)]
pub struct RunOutcome {
    /// The signal that has ended it, after the last step was saved; none where all steps are made.
    pub signal: Option<i32>,
    /// The run's memory by part, where it was watched.
    pub memory: Option<String>,
    /// How it went; the first rank says so for all.
    pub summary: Option<RunSummary>,
}

/// Begins a run in `dir`, which must be empty or not exist.
pub fn run(recipe: &Recipe, dir: &Path, start: Start<'_>) -> Result<RunOutcome, Fault> {
    // These checks come before anything is loaded or made, so that a refused run leaves nothing behind.
    if start.world.is_first() {
        require_unused(dir)?;
    }
    build::check_data(recipe, &ModelConfig::load(&recipe.model)?)?;
    let mut trainer = Trainer::new(recipe, dir, start)?;
    let _lock = trainer.ranks.world.first("making the directory of the run", || make(&trainer, dir))?;
    begin(&mut trainer, start.interrupt)
}

/// Makes the directory of a run, and writes down what it begins with.
fn make(trainer: &Trainer, dir: &Path) -> Result<DirLock, Fault> {
    files::make_dir(dir)?;
    let lock = DirLock::for_writing(dir)?;
    // Again: another run may have begun here while this one was loading.
    require_unused_by_others(dir)?;
    // The recipe last: where it is, the run has begun, and has its split.
    SavedSplit::write(&trainer.data, dir)?;
    write_recipe(&trainer.recipe, &dir.join(RESOLVED_RECIPE))?;
    Ok(lock)
}

/// From before the first step to the end.
pub(super) fn begin(trainer: &mut Trainer, interrupt: &Interrupt) -> Result<RunOutcome, Fault> {
    interrupt.watch_for_stops().map_err(|error| no_signals(&error))?;
    let mut callback = RunCallback::begin(trainer, false, interrupt)?;
    if trainer.recipe.eval.initial {
        match trainer.validate(&mut callback) {
            Ok(validation) => {
                let metrics = StepMetrics { peak_memory: peak_resident(), ..StepMetrics::default() };
                callback.stepped(metrics, validation.as_ref())?;
            }
            Err(error) if error.kind() == FaultKind::Interrupted => {
                trainer.ranks.listen()?;
                return interrupted(trainer, &callback);
            }
            Err(error) => return Err(error),
        }
    }
    if trainer.recipe.train.on_non_finite == OnNonFinite::Rollback {
        // A rollback needs a checkpoint.
        callback.saved(trainer.save(SaveKind::Intermediate)?);
    }
    go_on(trainer, &mut callback)
}

/// Refuses a directory with anything in it; says so if another process is at work there.
fn require_unused(dir: &Path) -> Result<(), Fault> {
    files::refuse_symlink(dir)?;
    DirLock::refuse_in_use(dir)?;
    require_unused_by_others(dir)
}

/// A start that was ended before it had anything to keep leaves a lock, a split without a recipe, and unfinished files.
fn require_unused_by_others(dir: &Path) -> Result<(), Fault> {
    let Ok(entries) = fs::read_dir(dir) else { return Ok(()) };
    let counts = |name: &str| ![DirLock::NAME, SPLIT].contains(&name) && !files::is_temporary(name);
    if entries.flatten().any(|entry| entry.file_name().to_str().is_none_or(counts)) {
        let hint = if dir.join(RESOLVED_RECIPE).exists() {
            format!("choose another `--out`, or go on with `kvtune resume {}`", shell_word(dir.display()))
        } else {
            "choose another `--out`, or empty the directory".to_owned()
        };
        return Err(Fault::usage(format!("the output directory `{}` is not empty", abridged(dir.display())), hint));
    }
    Ok(())
}

pub(super) fn go_on(trainer: &mut Trainer, callback: &mut RunCallback) -> Result<RunOutcome, Fault> {
    // Reading and tokenising may have taken more than a step does, on other threads.
    give_free_memory_back();
    loop {
        let metrics = match callback.unvalidated.take() {
            // A step whose validation was given up is made, and its line is not whole.
            Some(metrics) => metrics,
            None if trainer.step() >= trainer.schedule.num_steps() => return finish(trainer, callback),
            None => match trainer.advance(callback).and_then(|metrics| trainer.check_if_built_on().map(|()| metrics)) {
                Ok(metrics) => metrics,
                Err(error) if error.kind() == FaultKind::Interrupted => {
                    trainer.ranks.listen()?;
                    if trainer.step() > 0 {
                        save_unsaved(trainer, callback, SaveKind::Intermediate)?;
                    }
                    return interrupted(trainer, callback);
                }
                Err(error) => {
                    go_back(trainer, callback, error)?;
                    continue;
                }
            },
        };
        complete_step(trainer, callback, metrics)?;
        if trainer.ranks.signal().is_some() {
            return interrupted(trainer, callback);
        }
    }
}

/// Where a step is lost that the recipe lets go, the run goes back to its last checkpoint.
fn go_back(trainer: &mut Trainer, callback: &mut RunCallback, error: Fault) -> Result<(), Fault> {
    let why = error.to_string();
    let lost = leave_out(&mut trainer.state.skipped_steps, error, OnNonFinite::Rollback, &trainer.recipe.train)?;
    // The first rank sets aside what is damaged, before the others look.
    let found = trainer.ranks.world.first("going back to a checkpoint", || newest(&trainer.dir))?;
    let newest = found.map_or_else(|| newest(&trainer.dir), Ok)?;
    trainer.load(&newest)?;
    trainer.load_optimizer(&newest)?;
    callback.gone_back(trainer, &format!("{why}: back to `{}`, and without step {lost}", newest.display()))
}

/// Validates after a step where that is due, writes the step's line, and saves where that is due or asked for.
fn complete_step(trainer: &mut Trainer, callback: &mut RunCallback, metrics: StepMetrics) -> Result<(), Fault> {
    let validation = match trainer.is_eval_due().then(|| trainer.validate(callback)).transpose() {
        Err(error) if error.kind() == FaultKind::Interrupted => {
            trainer.state.owes_validation = true;
            trainer.ranks.listen()?;
            None
        }
        Err(error) => {
            trainer.state.owes_validation = true;
            callback.stepped(metrics, None)?;
            // What cannot be saved either is not what this is about.
            if let Ok(dir) = trainer.save(trainer.save_due().unwrap_or(SaveKind::Intermediate)) {
                callback.saved(dir);
            }
            return Err(error);
        }
        Ok(validation) => validation.flatten(),
    };
    // The line is on disk before the checkpoint: after a crash in between, the resume takes it back.
    callback.stepped(metrics, validation.as_ref())?;
    if validation.is_some_and(|validation| validation.is_best) {
        trainer.save(SaveKind::Best)?;
    }
    let due = trainer.save_due();
    let is_asked = trainer.ranks.takes_save() || trainer.ranks.signal().is_some();
    if let Some(kind) = due.or(is_asked.then_some(SaveKind::Intermediate)) {
        callback.saved(trainer.save(kind)?);
    }
    Ok(())
}

fn save_unsaved(trainer: &Trainer, callback: &RunCallback, kind: SaveKind) -> Result<(), Fault> {
    if trainer.saved.get() < Some(trainer.step()) {
        callback.saved(trainer.save(kind)?);
    }
    Ok(())
}

fn finish(trainer: &Trainer, callback: &mut RunCallback) -> Result<RunOutcome, Fault> {
    // What the optimiser holds stays in a checkpoint of the step.
    save_unsaved(trainer, callback, trainer.save_due().unwrap_or(SaveKind::Intermediate))?;
    // `final` comes last: where it is, nothing is missing.
    let summary = callback.end(trainer, "finished")?;
    callback.saved(trainer.save(SaveKind::Final)?);
    let ended = RunOutcome { signal: None, memory: trainer.memory_by_part(), summary };
    callback.output_fault.take().map_or(Ok(ended), Err)
}

fn interrupted(trainer: &Trainer, callback: &RunCallback) -> Result<RunOutcome, Fault> {
    let summary = callback.end(trainer, &format!("interrupted after step {}", trainer.step()))?;
    let signal = Some(trainer.ranks.signal().unwrap_or_default());
    Ok(RunOutcome { signal, memory: trainer.memory_by_part(), summary })
}

pub(super) fn no_signals(error: &std::io::Error) -> Fault {
    let message = format!("can't watch for signals: {error}");
    Fault::new(Exit::Failed, message).with_hint("a run must be able to save when it is interrupted")
}
