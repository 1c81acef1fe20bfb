//! Newtypes for the quantities that meet in one call, and what every error tells the user and the shell.

mod fault;
mod names;
mod quantities;
mod quoted;
#[cfg(test)]
pub(crate) mod sabotage;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use fault::{Fault, FaultKind};
pub(crate) use names::named;
pub use quantities::{Bytes, Seconds};
pub use quoted::{abridged, counted, is_unprintable, joined, listed, printable, quoted, shape, shell_word};

/// The items in their order, each once.
pub fn distinct<T: PartialEq>(all: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut seen = Vec::new();
    for item in all {
        if !seen.contains(&item) {
            seen.push(item);
        }
    }
    seen
}

/// A decoder layer, counted from 0 at the bottom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerIdx(pub usize);

/// What random numbers of a step depend on beside what they are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepKey {
    pub seed: u64,
    pub step: u64,
}

/// Exit codes of a process that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[repr(u8)]
pub enum Exit {
    /// Something failed that is none of the following.
    Failed = 1,
    /// The arguments or the recipe are wrong.
    Usage = 2,
    /// Data, weights or a checkpoint are wrong or missing.
    Data = 3,
    Memory = 4,
    /// A loss or a gradient is not finite.
    NotFinite = 5,
}

impl fmt::Display for LayerIdx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
