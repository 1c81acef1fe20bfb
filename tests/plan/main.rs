//! The planner against what is measured: what the engine holds, what a process takes, and what is chosen.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod decisions;
mod draws;
mod holdings;
mod peaks;
mod walked;
