//! Measured seconds and bytes of a step: what `bench`, `--profile-memory` and the peak of a run print.

mod clock;
mod memory;
mod profile;
mod step;
mod tokens;
#[cfg(test)]
mod tokens_tests;

pub(crate) use clock::Stopwatch;
pub use clock::{GemmRate, Spent, gemm_rate};
pub use memory::MemoryMeter;
pub use profile::{MemoryProfile, MemorySide, MicroBatchPosition};
pub use step::{BenchSummary, CopyCost, Spread, StepRecord, summarise};
pub use tokens::random_batch;
