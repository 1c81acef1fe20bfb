//! The loop: steps, validation, saving, resuming.

mod answers;
mod build;
mod error;
mod interrupt;
mod profile;
mod rehearsal;
mod resume;
mod retreat;
mod run;
mod run_dir;
mod saved_split;
mod schedule;
mod sealed_recipe;
mod skipped;
mod step;
mod tiling;
mod trainer;
mod watch;

pub use build::{
    as_headed, base_model, check_head, check_lengths, check_trained, drawn_model, engine, load_adapter, model, open_data,
    set_numerics, tokenizer,
};
pub use error::TrainError;
pub use interrupt::Interrupt;
pub use resume::{FoundCheckpoint, find_checkpoint, resolved_recipe, resume};
pub use retreat::{RetryingEngine, ends_rounding};
pub use run::{Ended, Outcome, Start, run};
pub use run_dir::RESOLVED_RECIPE;
pub use schedule::RunSchedule;
pub use step::{Learner, MicroBatchPosition, StepOutcome, StepWatch};
pub use tiling::{ResolvedRun, disk_of_run, heaviest, machine_of_trial, plan, settled, settled_with_data, timed};
pub use trainer::Trainer;
