//! Where the memory of a step went, part by part, as it is measured while the step is made.

mod by_part;
mod profiler;

pub use by_part::{MemoryProfile, Side};
pub use profiler::Profiler;
