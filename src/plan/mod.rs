//! The planner: what a step will take in memory and time, from shapes, and how it is best tiled within what there is.

mod attention;
mod baseline;
#[cfg(test)]
mod beside;
mod choose;
pub(crate) mod clock;
mod error;
mod flops;
mod forecast;
pub(crate) mod gemm;
mod head;
mod layer;
mod ledger;
mod limits;
mod machine;
mod part;
mod projection;
mod rates;
mod step_spec;
mod walk;

pub use baseline::ProcessBaseline;
pub use choose::{Alternative, Decision, Planner};
pub use clock::Spent;
pub use error::PlanError;
pub use flops::Flops;
pub use forecast::{Forecast, PlannedPeak};
pub use gemm::{Gemm, Rate};
pub use limits::Limits;
pub use machine::Machine;
pub use part::StepPart;
pub use rates::Rates;
pub use step_spec::{StepSpec, TrainedPart};
pub use walk::Span;
