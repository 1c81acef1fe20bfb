//! The stopwatch that gives each moment of a step to one of its parts.

use tch::Device;

use crate::engine::{Event, MemoryByPart, Observer};
use crate::native::{SyncCounter, Syncs};
use crate::plan::clock::Reading;
use crate::plan::{Spent, StepPart};
use crate::profile::Profiler;

/// Runs from its making on, and is told which part the time from then on belongs to.
pub(super) struct Stopwatch {
    device: Device,
    began: Reading,
    turned: Reading,
    part: StepPart,
    parts: [Spent; 6],
    left_out: Spent,
}

impl Stopwatch {
    pub(super) fn start(device: Device) -> Self {
        let now = Reading::now(device);
        Self { device, began: now, turned: now, part: StepPart::Forward, parts: Default::default(), left_out: Spent::default() }
    }

    /// From now on it is `part` that the time is spent on.
    pub(super) fn turn(&mut self, part: StepPart) {
        let now = Reading::now(self.device);
        self.parts[self.part as usize].add(now.since(self.turned));
        (self.turned, self.part) = (now, part);
    }

    /// The time since the last turn is none of the step's.
    fn leave_out(&mut self) {
        let now = Reading::now(self.device);
        self.left_out.add(now.since(self.turned));
        self.turned = now;
    }

    /// The whole, from the first reading of the clocks to the last, and its parts.
    pub(super) fn stop(mut self) -> (Spent, [Spent; 6]) {
        self.turn(StepPart::Optimizer);
        let Spent { seconds, cpu_seconds } = self.turned.since(self.began);
        let (seconds, cpu_seconds) = (seconds - self.left_out.seconds, cpu_seconds - self.left_out.cpu_seconds);
        (Spent { seconds, cpu_seconds }, self.parts)
    }
}

/// Watches the time of a step, and its memory where that is wanted.
pub(super) struct BenchObserver<'a> {
    pub(super) stopwatch: Stopwatch,
    pub(super) profiler: Option<&'a mut Profiler>,
    pub(super) waits: Option<SyncsByPart>,
}

/// Counts what makes the host wait for the device, part by part.
pub(super) struct SyncsByPart {
    counter: SyncCounter,
    seen: Syncs,
    part: StepPart,
    parts: [Syncs; 6],
}

impl SyncsByPart {
    /// Begins to count; `None` where libtorch does not let us.
    pub(super) fn start() -> Option<Self> {
        let counter = SyncCounter::start()?;
        Some(Self { counter, seen: Syncs::default(), part: StepPart::Forward, parts: Default::default() })
    }

    /// From now on they belong to `part`.
    fn turn(&mut self, part: StepPart) {
        let now = self.counter.read();
        let own = &mut self.parts[self.part as usize];
        *own = own.plus(now.since(self.seen));
        (self.seen, self.part) = (now, part);
    }

    /// By part.
    pub(super) fn stop(mut self) -> [Syncs; 6] {
        self.turn(StepPart::Optimizer);
        self.parts
    }
}

impl BenchObserver<'_> {
    /// The engine is done, and holds `memory` still.
    pub(super) fn optimizer(&mut self, memory: impl FnOnce() -> MemoryByPart) {
        self.turn(StepPart::Optimizer);
        self.measure(StepPart::Optimizer, memory);
    }

    fn turn(&mut self, part: StepPart) {
        self.stopwatch.turn(part);
        if let Some(waits) = &mut self.waits {
            waits.turn(part);
        }
    }

    fn measure(&mut self, part: StepPart, memory: impl FnOnce() -> MemoryByPart) {
        if let Some(profiler) = &mut self.profiler {
            profiler.turn(part, memory());
            self.stopwatch.leave_out();
        }
    }
}

impl Observer for BenchObserver<'_> {
    fn observe(&mut self, event: Event) {
        self.turn(event.into());
    }

    fn measure(&mut self, event: Event, memory: &dyn Fn() -> MemoryByPart) {
        self.measure(event.into(), memory);
    }
}
