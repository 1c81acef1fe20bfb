//! Optimisers, schedules and clipping, on named parameters; state that can be saved.

mod adadelta;
mod adam;
mod adamax;
mod clip;
mod dynamic_map;
mod optimizer;
mod remembered;
mod rmsprop;
mod schedule;
mod sgd;
#[cfg(test)]
mod tests;
mod update;

pub use clip::{clip_grad_norm, in_one_place};
pub use optimizer::{Optimizer, build, bytes_of_state, update_bytes};
pub use schedule::learning_rate;
