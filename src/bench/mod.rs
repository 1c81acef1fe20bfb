//! Full training steps on random tokens: where their time and memory go.

mod clock;
mod error;
mod flops;
mod gemm;
mod memory;
mod parts;
mod record;
mod steps;
mod tokens;

pub use clock::Spent;
pub use error::BenchError;
pub use flops::Flops;
pub use gemm::{Gemm, Rate};
pub use memory::{MemoryProfile, Side};
pub use parts::Part;
pub use record::{Spread, StepRecord, Summary, summarise};
pub use steps::{Bench, Size};
