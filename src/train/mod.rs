//! The loop: steps, validation, saving, resuming.

mod answers;
mod assignment;
mod bench;
mod build;
mod calibrate;
mod callback;
mod evicted;
mod interrupt;
mod meter;
mod oom_fallback;
mod optimizer_state;
mod rank_facts;
mod rank_reports;
mod resume;
mod run;
mod run_ranks;
mod saved_split;
mod saving;
mod schedule;
mod sealed_recipe;
mod step;
mod teacher;
#[cfg(test)]
mod tests;
mod tiling;
mod trainer;

pub use answers::check_answers;
pub use assignment::MicroBatchAssignment;
pub use bench::{Bench, BenchOptions};
pub use build::{
    as_headed, base_model, check_data, check_head, check_trained, chosen_template, draw_new_b, engine, gates_of, limits,
    load_adapter, load_gates, model, open_data, set_numerics,
};
pub use calibrate::{Calibrated, GRACE_PERIOD, SLOTS_STEP, calibrate, fewest_slots, for_calibration};
pub use evicted::ExpectedEvictions;
pub use interrupt::Interrupt;
pub use meter::StepMeter;
pub use oom_fallback::ends_rounding;
pub use optimizer_state::ShardedOptimizerState;
pub use rank_facts::{check_same_evaluation, resolved_alike};
pub use resume::{FoundCheckpoint, find_checkpoint, resolved_recipe_path, resume, resume_or_run};
pub use run::{RunOutcome, run};
pub use run_ranks::{RunRanks, check_even};
pub use schedule::RunSchedule;
pub use step::TrainStep;
pub use teacher::Teacher;
pub use tiling::{ResolvedRun, disk_of_run, heaviest, machine_of_trial, plan, resolved, resolved_with_data};
pub use trainer::{Start, Trainer};

use std::path::Path;

use crate::units::{Exit, Fault, abridged};

/// The recipe of a run, in its directory.
pub const RESOLVED_RECIPE: &str = "recipe.resolved.toml";

/// A checkpoint of a model with other parameters.
fn other_model(checkpoint: &Path, difference: &str) -> Fault {
    let (path, difference) = (abridged(checkpoint.display()), abridged(difference));
    let message = format!("the checkpoint `{path}` belongs to another model or adapter: {difference}");
    Fault::data(message, "resume with the model and the settings that the run began with")
}

/// A checkpoint could not be written: what was to be written is right, wherever that failed.
fn not_saved(error: Fault) -> Fault {
    error.with_exit(Exit::Failed)
}
