//! The parts of a step, and the stopwatch that gives each moment of it to one of them.

use tch::Device;

use super::clock::{Moment, Spent};
use super::memory::Profiler;
use crate::engine::{Event, MemoryByPart, Observer};

/// A part of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The forward phase, but for the head.
    Forward,
    /// The loss and its gradient: in the forward phase, or in the cells where all layers are one row.
    Head,
    /// The second forward of rows of cells below the top one.
    Replay,
    /// Unwinding cells to their left border and computing them again with autograd.
    Recompute,
    /// Backward through cells.
    Backward,
    /// Clipping and update.
    Optimizer,
}

impl Part {
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

/// Runs from its making on, and is told which part the time from then on belongs to.
pub(super) struct Stopwatch {
    device: Device,
    began: Moment,
    turned: Moment,
    part: Part,
    parts: [Spent; 6],
    left_out: Spent,
}

impl Stopwatch {
    pub(super) fn start(device: Device) -> Self {
        let now = Moment::now(device);
        Self { device, began: now, turned: now, part: Part::Forward, parts: Default::default(), left_out: Spent::default() }
    }

    /// From now on it is `part` that the time is spent on.
    pub(super) fn turn(&mut self, part: Part) {
        let now = Moment::now(self.device);
        self.parts[self.part as usize].add(now.since(self.turned));
        (self.turned, self.part) = (now, part);
    }

    /// The time since the last turn is none of the step's.
    fn leave_out(&mut self) {
        let now = Moment::now(self.device);
        self.left_out.add(now.since(self.turned));
        self.turned = now;
    }

    /// The whole, read from the clocks once more, and its parts.
    pub(super) fn stop(mut self) -> (Spent, [Spent; 6]) {
        self.turn(Part::Optimizer);
        let Spent { seconds, cpu_seconds } = Moment::now(self.device).since(self.began);
        let (seconds, cpu_seconds) = (seconds - self.left_out.seconds, cpu_seconds - self.left_out.cpu_seconds);
        (Spent { seconds, cpu_seconds }, self.parts)
    }
}

impl From<Event> for Part {
    fn from(event: Event) -> Self {
        match event {
            Event::ForwardColumn { .. } => Self::Forward,
            Event::Head { .. } => Self::Head,
            Event::Replay { .. } => Self::Replay,
            Event::Cell { .. } => Self::Recompute,
            Event::CellBackward { .. } => Self::Backward,
        }
    }
}

/// Watches the time of a step, and its memory where that is wanted.
pub(super) struct Watch<'a> {
    pub(super) stopwatch: Stopwatch,
    pub(super) profiler: Option<&'a mut Profiler>,
}

impl Watch<'_> {
    /// The engine is done, and holds `memory` still.
    pub(super) fn optimizer(&mut self, memory: impl FnOnce() -> MemoryByPart) {
        self.stopwatch.turn(Part::Optimizer);
        self.weigh(Part::Optimizer, memory);
    }

    fn weigh(&mut self, part: Part, memory: impl FnOnce() -> MemoryByPart) {
        if let Some(profiler) = &mut self.profiler {
            profiler.turn(part, memory());
            self.stopwatch.leave_out();
        }
    }
}

impl Observer for Watch<'_> {
    fn observe(&mut self, event: Event) {
        self.stopwatch.turn(event.into());
    }

    fn weigh(&mut self, event: Event, memory: &dyn Fn() -> MemoryByPart) {
        self.weigh(event.into(), memory);
    }
}
