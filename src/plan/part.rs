//! The parts of a step, by which its time and its memory are told.

use crate::engine::Event;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepPart {
    /// The forward phase, but for the head.
    Forward,
    /// The loss and its gradient: in the forward phase, or in the cells where all layers are one band.
    Head,
    /// The second forward of layer bands below the top one.
    Replay,
    /// Unwinding cells to their left border and computing them again with autograd.
    Recompute,
    Backward,
    Optimizer,
}

impl StepPart {
    /// In the order in which they come.
    pub const ALL: [Self; 6] = [Self::Forward, Self::Head, Self::Replay, Self::Recompute, Self::Backward, Self::Optimizer];

    /// The name in tables and keys.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Head => "head",
            Self::Replay => "replay",
            Self::Recompute => "recompute",
            Self::Backward => "backward",
            Self::Optimizer => "optimizer",
        }
    }
}

impl From<Event> for StepPart {
    fn from(event: Event) -> Self {
        match event {
            Event::ForwardColumn { .. } => Self::Forward,
            Event::Head { .. } => Self::Head,
            Event::Replay { .. } => Self::Replay,
            Event::Cell { is_kept: false, .. } => Self::Recompute,
            Event::Cell { is_kept: true, .. } | Event::CellBackward { .. } => Self::Backward,
        }
    }
}
