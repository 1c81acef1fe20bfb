//! Newtypes for the quantities that meet in one call, and what every error tells the user and the shell.

mod fault;
mod quantities;
mod quoted;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use fault::{Exits, Fault, FaultKind, PassedFault};
pub use quantities::{Bytes, Seconds};
pub use quoted::{abridged, counted, joined, listed, printable, quoted, shape};

/// A decoder layer, counted from 0 at the bottom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerIdx(pub usize);

/// An event of the cache, counted from 0: the whole prefill span is chunk 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkIdx(pub usize);

/// What an error means for whoever started the process.
pub trait Failure {
    /// What the user can do: one sentence without a full stop, in lower case, or `None` where there is nothing to do. Every error that
    /// a user can cause has a hint.
    fn hint(&self) -> Option<String> {
        self.origin().and_then(Failure::hint)
    }

    fn exit(&self) -> Exit {
        self.origin().map_or(Exit::Failed, Failure::exit)
    }

    fn kind(&self) -> FaultKind {
        self.origin().map_or(FaultKind::Other, Failure::kind)
    }

    /// Errors that were found beside this one, each with its hint.
    fn further(&self) -> Vec<(&dyn std::error::Error, Option<String>)> {
        self.origin().map_or_else(Vec::new, Failure::further)
    }

    /// The error of another room that this one passes on.
    fn origin(&self) -> Option<&dyn Failure> {
        None
    }
}

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

impl fmt::Display for ChunkIdx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
