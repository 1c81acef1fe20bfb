//! The planner against what is measured: what the engine holds, what a process takes, and what is chosen.

mod decisions;
mod draws;
mod ledger;
mod peaks;
mod walked;
