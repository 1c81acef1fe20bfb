//! Fine-tunes language models on very long sequences, with the KV-cache policy in the loop.
//!
//! `docs/ARCHITECTURE.md` is the map of the rooms below; `tests/layering.rs` is the same map in code.

pub mod cache;
pub mod checkpoint;
pub mod cli;
pub mod data;
pub mod dist;
pub mod engine;
pub mod eval;
pub mod export;
pub mod files;
pub mod generation;
pub mod head;
pub mod inspect;
pub mod measure;
pub mod metrics;
pub mod model;
pub mod native;
pub mod ops;
pub mod optim;
pub mod plan;
pub mod recipe;
pub mod report;
pub mod serve;
pub mod store;
pub mod train;
pub mod units;
pub mod verify;

#[cfg(test)]
mod sabotage;

// The factory of the proofs belongs to the integration tests, which speak of the library from outside.
#[cfg(test)]
extern crate self as kvtune;
