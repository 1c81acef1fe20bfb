//! Going on with a run: the checkpoint, and what may differ in the recipe.

use std::path::{Path, PathBuf};

use super::callback::RunCallback;
use super::run::{begin, go_on, no_signals, run};
use super::saved_split::SavedSplit;
use super::saving::{listed_differences, newest};
use super::sealed_recipe::{changed_file, check_recipe, write_recipe};
use super::teacher::TEACHER;
use super::{RESOLVED_RECIPE, RunOutcome, RunSchedule, Start, Trainer};
use crate::checkpoint::{self, FINAL, SaveKind};
use crate::files::{self, DirLock};
use crate::optim::learning_rate;
use crate::recipe::{Recipe, TrainedWeights};
use crate::report::console;
use crate::units::{Exit, Fault, FaultKind, abridged, quoted};

#[derive(Debug)]
pub struct FoundCheckpoint {
    pub run: PathBuf,
    pub dir: PathBuf,
    pub holds: TrainedWeights,
    /// Keeps it from being removed by a run that goes on meanwhile.
    _reading: DirLock,
}

/// The checkpoint that `path` means: itself, or the newest of a run.
pub fn find_checkpoint(path: &Path) -> Result<FoundCheckpoint, Fault> {
    if let Some(holds) = checkpoint::holds(path) {
        let reading = DirLock::for_reading(path)?;
        checkpoint::check(path)?;
        let absolute = files::absolute(path);
        let run = absolute.parent().unwrap_or(path).to_owned();
        if let Ok(recipe) = resolved_recipe_path(&run) {
            check_recipe(&recipe)?;
        }
        let reading = reading.ok_or_else(|| gone(path))?;
        return Ok(FoundCheckpoint { run, dir: path.to_owned(), holds, _reading: reading });
    }
    check_recipe(&resolved_recipe_path(path)?)?;
    // The run may go on meanwhile, and remove the one that was found before it is held.
    for _ in 0..8 {
        let found = checkpoint::newest(path)?;
        if let Some(reading) = DirLock::for_reading(&found.dir)? {
            for (dir, why) in &found.skipped {
                console::warning(&format!("skipped `{}`: {why}", dir.display()));
            }
            // One that holds neither is looked at as an adapter, which says what is missing.
            let holds = checkpoint::holds(&found.dir).unwrap_or(TrainedWeights::Adapter);
            return Ok(FoundCheckpoint { run: path.to_owned(), dir: found.dir, holds, _reading: reading });
        }
    }
    Err(gone(path))
}

fn gone(path: &Path) -> Fault {
    let message = format!("the checkpoint in `{}` is being removed by its run", path.display());
    Fault::new(Exit::Failed, message).with_hint("name another checkpoint of the run, or the run for its newest")
}

pub fn resolved_recipe_path(dir: &Path) -> Result<PathBuf, Fault> {
    let path = dir.join(RESOLVED_RECIPE);
    if path.exists() {
        return Ok(path);
    }
    let message = format!("`{}` is not the directory of a run: it has no `{RESOLVED_RECIPE}`", abridged(dir.display()));
    let hint = "name the directory of a run, which `kvtune finetune-lora` or `finetune-full` has written";
    Err(Fault::usage(message, hint))
}

/// The checkpoint of a run that the user names: one of its own, not a path to somewhere else.
fn named(run: &Path, name: &str) -> Result<PathBuf, Fault> {
    let mut known = checkpoint::names(run)?;
    if known.iter().any(|k| k == name) {
        return Ok(run.join(name));
    }
    known.sort();
    let expected = if known.is_empty() { "none, as nothing is saved yet".to_owned() } else { known.join(", ") };
    let (run, name) = (abridged(run.display()), quoted(name));
    let message = format!("the run `{run}` has no checkpoint `{name}`: expected {expected}");
    Err(Fault::usage(message, "name one of these, or leave `--from` out for the newest"))
}

/// Goes on with the run in `dir`, from the newest checkpoint or the one named `from`.
pub fn resume(dir: &Path, from: Option<&str>, overrides: &[String], how: Start<'_>) -> Result<RunOutcome, Fault> {
    resume_as(dir, from, |path, _| Ok(Recipe::load(path, overrides)?.recipe), how)
}

/// Goes on with the run of `recipe` in `dir`, or begins it where none has begun there: what is started again and again by the same command.
pub fn resume_or_run(recipe: &Recipe, dir: &Path, how: Start<'_>) -> Result<RunOutcome, Fault> {
    // The first rank says so for all: when others look it may have begun already.
    let has_begun = how.world.of_first("looking for a run", || Ok(dir.join(RESOLVED_RECIPE).exists()))?;
    if !has_begun {
        return run(recipe, dir, how);
    }
    let as_asked = |_: &Path, began: &Recipe| {
        let mut recipe = recipe.clone();
        // What the command leaves open was decided when the run began.
        recipe.grad = recipe.grad.decided_as(&began.grad);
        recipe.kv_cache.chunk_size = recipe.kv_cache.chunk_size.or(began.kv_cache.chunk_size);
        let first_day = began.data.chat.chat_template_date;
        recipe.data.change(&|data| data.chat.chat_template_date = data.chat.chat_template_date.or(first_day));
        Ok(recipe)
    };
    resume_as(dir, None, as_asked, how)
}

/// Goes on with the run in `dir` by the recipe that `as_asked` makes of the file of its own, and of what that says.
fn resume_as(
    dir: &Path,
    from: Option<&str>,
    as_asked: impl Fn(&Path, &Recipe) -> Result<Recipe, Fault>,
    how: Start<'_>,
) -> Result<RunOutcome, Fault> {
    let path = resolved_recipe_path(dir)?;
    let _lock = how.world.first("taking the directory of the run", || DirLock::for_writing(dir))?;
    let is_sealed = check_recipe(&path)?;
    let began = Recipe::load(&path, &[])?.recipe;
    let recipe = as_asked(&path, &began)?;
    let differences = began.changes_refused_on_resume(&recipe);
    if !differences.is_empty() {
        let message =
            format!("a resumed run must go on as it began, but the recipe differs:{}", listed_differences(&differences));
        let hint = "only the length of the run, logging, saving, `grad.*`, `kv_cache.cpu_offload` and the paths of model and \
                    data may change on resume";
        return Err(Fault::usage(message, hint));
    }
    let from = from.map(|name| name.trim_end_matches('/'));
    // The first rank says from where all go on.
    let start = how.world.of_first("looking for a checkpoint", || cleaned_start(dir, from))?;
    let mut trainer = Trainer::new(&recipe, dir, how)?;
    let has_split = SavedSplit::check(&trainer.data, dir, &trainer.recipe.model.path)?;
    let kind = start.as_ref().map(|start| trainer.load(start)).transpose()?;
    check_records(&trainer, &path, is_sealed, start.is_some())?;
    let has_all_steps = trainer.step() >= trainer.schedule.num_steps();
    // Where `final` is the newest, nothing is left to write.
    if kind == Some(SaveKind::Final) && has_all_steps && checkpoint::latest(dir).is_some_and(|name| name == FINAL) {
        let keep = trainer.recipe.checkpoint.intermediate_save_keep;
        how.world.first("removing checkpoints", || checkpoint::retain(dir, keep))?;
        let (made, asked) = (trainer.step(), trainer.schedule.num_steps());
        console::note(&format!("nothing to do: {made} steps are made, the recipe asks for {asked}"));
        return Ok(RunOutcome { signal: None, memory: None, summary: None });
    }
    start.as_ref().map(|start| trainer.load_optimizer(start)).transpose()?;
    if !has_split {
        how.world.first("writing the split", || SavedSplit::write(&trainer.data, dir))?;
    }
    if !began.differences(&recipe).is_empty() || !is_sealed {
        how.world.first("writing the recipe", || write_recipe(&trainer.recipe, &path))?;
    }
    let Some(start) = start else {
        console::note("no checkpoint was written yet: beginning again");
        return begin(&mut trainer, how.interrupt);
    };
    if let Some(name) = from
        && let Some(Some(aside)) = how.world.first("moving checkpoints", || checkpoint::abandon(dir, name, trainer.step()))?
    {
        console::note(&format!("moved the later checkpoints to `{}`", aside.display()));
    }
    console::note(&format!("resuming after step {} from `{}`", trainer.step(), start.display()));
    if let Some(warning) = stretched(&trainer, &began) {
        console::warning(&warning);
    }
    how.interrupt.watch_for_stops().map_err(|error| no_signals(&error))?;
    let mut callback = RunCallback::begin(&mut trainer, true, how.interrupt)?;
    // The best is saved first: a crash may have come between it and the save that was due at the same step.
    if kind == Some(SaveKind::Best)
        && let Some(due) = trainer.save_due()
    {
        callback.saved(trainer.save(due)?);
    }
    go_on(&mut trainer, &mut callback)
}

/// What becomes of the learning rate where the run is longer or shorter than it was to be.
fn stretched(trainer: &Trainer, began: &Recipe) -> Option<String> {
    let (step, optimizer) = (trainer.step(), &trainer.recipe.optimizer);
    let (before, after) = (RunSchedule::new(began, trainer.data.train.lengths()).num_steps(), trainer.schedule.num_steps());
    let (last, next) = (learning_rate(optimizer, step.checked_sub(1)?, before), learning_rate(optimizer, step, after));
    // After its last step a schedule plans nothing.
    let planned = if step < before { learning_rate(optimizer, step, before) } else { last };
    (step < after && (next - planned).abs() > 0.01 * planned).then(|| {
        format!(
            "the {} schedule has {after} steps now, and had {before}: the learning rate is {last:.1e} at step {step} and {next:.1e} at step {}. \
             To go on at a low rate, begin a new run from `{FINAL}` with a smaller `optimizer.learning_rate`",
            optimizer.schedule,
            step + 1
        )
    })
}

/// What the run has written beside its checkpoints must fit the one that was loaded. What an earlier version wrote can't be checked.
fn check_records(trainer: &Trainer, recipe: &Path, is_sealed: bool, is_loaded: bool) -> Result<(), Fault> {
    if !is_loaded {
        return Ok(());
    }
    trainer.kept_metrics()?;
    if trainer.state.unchecked_metrics.is_none() {
        console::note(
            "an earlier version saved this checkpoint: whether recipe and metrics are as it left them can't be checked",
        );
    } else if !is_sealed {
        return Err(changed_file(recipe));
    }
    Ok(())
}

/// [`start`], in a directory without what earlier starts have left over.
fn cleaned_start(dir: &Path, from: Option<&str>) -> Result<Option<PathBuf>, Fault> {
    let mut leftovers = checkpoint::clean_leftovers(dir)?;
    let teacher = dir.join(TEACHER);
    // Where a link leads, another run may be writing.
    if teacher.is_dir() && !teacher.is_symlink() {
        leftovers.extend(checkpoint::clean_leftovers(&teacher)?);
    }
    for leftover in leftovers {
        console::note(&format!("removed `{}`, left by a save that was cut short", leftover.display()));
    }
    checkpoint::refuse_links(dir)?;
    start(dir, from)
}

/// The checkpoint to start from; none if the run ended before its first was written.
fn start(run: &Path, from: Option<&str>) -> Result<Option<PathBuf>, Fault> {
    if let Some(name) = from {
        return named(run, name).map(Some);
    }
    match newest(run) {
        Ok(dir) => Ok(Some(dir)),
        Err(error) if error.kind() == FaultKind::NoCheckpoint => Ok(None),
        Err(error) => Err(error),
    }
}
