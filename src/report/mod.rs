//! Everything that a person reads: console, tables, progress, metrics, event files, summary.

pub mod console;
pub mod metrics;
pub mod program;
pub mod progress;
pub mod summary;
pub mod table;
pub mod tensorboard;
