//! The planner: what a step will take in memory and time, from its shapes, and how it is best tiled within what there is.

mod attention;
mod baseline;
mod choose;
#[cfg(test)]
mod fixtures;
mod flops;
mod forecast;
mod head;
mod held;
mod ladder;
mod layer;
mod ledger;
mod limits;
mod machine;
mod outputs;
mod part;
#[cfg(test)]
mod prefetched;
mod projection;
mod step_spec;
mod step_time;
mod walk;

pub use baseline::ProcessBaseline;
pub use choose::{Alternative, Decision, Planner};
pub use flops::Flops;
pub use forecast::{Forecast, PlannedPeak};
pub use held::{HeldMemory, MemoryEntry};
pub use limits::Limits;
pub use machine::Machine;
pub use part::StepPart;
pub use step_spec::{StepSpec, TrainedPart};
pub use step_time::{StepTimes, StepWork};
pub use walk::Span;
