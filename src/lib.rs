//! Fine-tunes language models on very long sequences, with the KV-cache policy in the loop.
//!
//! `docs/ARCHITECTURE.md` is the map of the rooms below; `tests/layering.rs` is the same map in code.

pub mod cache;
pub mod engine;
pub mod generation;
pub mod model;
pub mod recipe;
pub mod train;
pub mod verify;

// The binary, tests and benches call these too; nobody builds on them.
#[doc(hidden)]
pub mod checkpoint;
#[doc(hidden)]
pub mod cli;
#[doc(hidden)]
pub mod data;
#[doc(hidden)]
pub mod dist;
#[doc(hidden)]
pub mod eval;
#[doc(hidden)]
pub mod export;
#[doc(hidden)]
pub mod files;
#[doc(hidden)]
pub mod head;
#[doc(hidden)]
pub mod inspect;
#[doc(hidden)]
pub mod measure;
#[doc(hidden)]
pub mod metrics;
#[doc(hidden)]
pub mod native;
#[doc(hidden)]
pub mod ops;
#[doc(hidden)]
pub mod optim;
#[doc(hidden)]
pub mod plan;
#[doc(hidden)]
pub mod report;
#[doc(hidden)]
pub mod serve;
#[doc(hidden)]
pub mod store;
#[doc(hidden)]
pub mod units;

// The factory of the proofs belongs to the integration tests, which speak of the library from outside.
#[cfg(test)]
extern crate self as kvtune;
