//! Several ranks that make a run's steps together: who runs which micro-batches, what they tell each other, and what each keeps.

mod assignment;
mod gradient_sum;
mod optimizer_state;
mod reports;
mod run_ranks;
mod same;

pub(super) use assignment::MicroBatchAssigner;
pub use assignment::MicroBatchAssignment;
pub(super) use gradient_sum::sum_over;
pub use optimizer_state::ShardedOptimizerState;
pub(super) use reports::{MicroBatchReport, RankReport, loss_sum, metrics_of, suspects};
pub use run_ranks::{RunRanks, check_even};
pub(super) use same::{check_same, of_data, of_model, of_recipe, of_trained, resolved_run};
pub use same::{check_same_evaluation, resolved_alike};
