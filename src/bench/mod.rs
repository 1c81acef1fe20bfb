//! Full training steps on random tokens: where their time and memory go.

mod gemm;
mod parts;
mod record;
mod steps;
mod tokens;

pub use gemm::Rate;
pub use record::{BenchSummary, CopyCost, Spread, StepRecord, summarise};
pub use steps::{Bench, Size};
pub use tokens::batch;
