//! The tests of the library and the binary, in one program: each suite is a module, `cargo test --test suite gradients` runs one of them.
//!
//! The proofs on a GPU are the program beside it (`tests/device`), which is carried to other machines.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test that cannot go on fails, and says what it saw or why it saw nothing"
)]

mod binary;
mod cli;
mod conformance;
mod dist;
mod generation;
mod golden;
mod gradients;
mod hostile;
mod kernels;
mod layering;
mod life;
mod metrics;
mod plan;
mod policy_contract;
mod recipes;
mod replay_log;
mod scaling;
mod serve;
mod starter;
mod support;
mod syncs;
mod weights;

// The policy of the guide names its rooms as if it stood in `src`.
use kvtune::{cache, recipe, units};
