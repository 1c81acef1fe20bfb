//! The planner: what a step will take in memory and time, from shapes, and how it is best tiled within what there is.

mod attention;
#[cfg(test)]
mod beside;
mod choose;
pub(crate) mod clock;
mod error;
mod flops;
mod forecast;
pub(crate) mod gemm;
mod ground;
mod head;
mod holdings;
mod layer;
mod limits;
mod machine;
mod part;
mod rates;
mod subject;
mod walk;

pub use choose::{Alternative, Decision, Planner};
pub use clock::Spent;
pub use error::PlanError;
pub use flops::Flops;
pub use forecast::{Forecast, Peak};
pub use gemm::{Gemm, Rate};
pub use ground::Ground;
pub use limits::Limits;
pub use machine::Machine;
pub use part::Part;
pub use rates::Rates;
pub use subject::{Subject, Trained};
pub use walk::Moment;
