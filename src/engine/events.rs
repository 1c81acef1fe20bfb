//! What the engine tells whoever watches: where it is, and what it holds there.

use super::MemoryByPart;

/// A point of a step. A column is its index from the left and the number of columns, a band its index from the top and the number of bands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A column of the forward phase begins.
    ForwardColumn { column: (usize, usize) },
    /// The head's loss, and its gradient where one is wanted, begins for the hidden states of a column.
    Head { column: (usize, usize) },
    /// A band's second forward begins.
    Replay { band: (usize, usize) },
    /// A cell of the backward phase begins: its caches are unwound, and it is computed again with autograd, unless its graph was kept.
    Cell { band: (usize, usize), column: (usize, usize), is_kept: bool },
    /// The graph of a cell is there, and its backward begins.
    CellBackward { band: (usize, usize), column: (usize, usize) },
}

/// Receives the events of a step.
pub trait Observer {
    /// Called with what whoever follows the run should know.
    fn note(&mut self, text: &str) {
        let _ = text;
    }

    /// Called at each point, from the thread that runs the step. `memory` goes through all that the engine holds there, so ask it only if
    /// the answer is wanted.
    fn observe(&mut self, event: Event, memory: &dyn Fn() -> MemoryByPart) {
        let _ = (event, memory);
    }

    /// Asked after [`Self::observe`] at each point: whether what is being run is given up there. Nothing of it is kept then.
    fn wants_to_stop(&self) -> bool {
        false
    }
}

#[derive(Debug)]
pub struct NoObserver;

impl Observer for NoObserver {}
