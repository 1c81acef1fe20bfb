//! `kvtune evaluate`.

mod answers;
mod differences;
mod loss_file;
mod samples;
mod table;
mod targets;
mod verb;

pub(super) use samples::SampleArguments;
pub(super) use targets::targets;
pub(super) use verb::Evaluate;
