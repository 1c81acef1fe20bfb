//! `kvtune evaluate`.

mod answers;
mod results;
mod targets;
mod verb;

pub(super) use targets::{SampleArguments, targets};
pub(super) use verb::Evaluate;
