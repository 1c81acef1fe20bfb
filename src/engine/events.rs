//! What the engine tells whoever watches: where it is.

/// A point of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A column of the forward phase begins.
    ForwardColumn {
        /// Index and number of columns.
        column: (usize, usize),
    },
    /// A row's second forward begins.
    Replay {
        /// Index from the top, and number of rows.
        row: (usize, usize),
    },
    /// A cell of the backward phase begins.
    Cell {
        /// Index from the top, and number of rows.
        row: (usize, usize),
        /// Index from the left, and number of columns.
        column: (usize, usize),
    },
}

/// Receives the events of a step.
pub trait Observer {
    /// Called at each point, from the thread that runs the step.
    fn observe(&mut self, event: Event);
}

/// Watches nothing.
#[derive(Debug)]
pub struct Silent;

impl Observer for Silent {
    fn observe(&mut self, _event: Event) {}
}
