//! The planner against what is measured: what a process takes, and what is chosen.

mod decisions;
mod draws;
mod peaks;
