//! The loop: steps, validation, saving, resuming.

mod answers;
mod build;
mod deal;
mod error;
mod evicted;
mod interrupt;
mod profile;
mod rank_error;
mod ranks;
mod reports;
mod resume;
mod retreat;
mod run;
mod run_dir;
mod same;
mod saved_split;
mod saving;
mod schedule;
mod sealed_recipe;
mod shared_sum;
mod skipped;
mod start;
mod state_parts;
mod step;
#[cfg(test)]
mod tests;
mod tiling;
mod trainer;
mod watch;

pub use build::{
    as_headed, base_model, check_head, check_lengths, check_max_seq_length, check_trained, chosen_template, drawn_model, engine,
    limits, load_adapter, model, open_data, set_numerics, tokenizer,
};
pub use error::TrainError;
pub use evicted::ExpectedEvictions;
pub use interrupt::Interrupt;
pub use rank_error::RankError;
pub use ranks::{RunRanks, check_even};
pub use reports::StepOutcome;
pub use resume::{FoundCheckpoint, find_checkpoint, resolved_recipe, resume, resume_or_run};
pub use retreat::{RetryingEngine, ends_rounding};
pub use run::{Ended, Outcome, run};
pub use run_dir::RESOLVED_RECIPE;
pub use same::{check_same_evaluation, settled_alike};
pub use schedule::RunSchedule;
pub use start::Start;
pub use state_parts::StateParts;
pub use step::{Learner, MicroBatchPosition, StepShare, StepWatch};
pub use tiling::{ResolvedRun, disk_of_run, heaviest, machine_of_trial, plan, settled, settled_with_data};
pub use trainer::Trainer;
