//! The planner: what a step will take in memory and time, from its shapes, and how it is best tiled within what there is.

mod baseline;
mod choose;
#[cfg(test)]
mod fixtures;
mod flops;
mod forecast;
mod ladder;
mod machine;
mod moment;
mod sizes;
mod step_memory;
mod step_spec;

pub use baseline::ProcessBaseline;
pub use choose::{Alternative, Decision, Planner};
pub use flops::Flops;
pub use forecast::Forecast;
pub use machine::{Limits, Machine};
pub use moment::{PlannedPeak, StepPart};
pub use step_memory::GRAPHS;
pub use step_spec::StepSpec;

pub use crate::model::TrainedPart;
