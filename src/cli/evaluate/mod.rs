//! `kvtune evaluate`.

mod answers;
mod samples;
mod table;
mod targets;
mod verb;

pub(super) use verb::Evaluate;
