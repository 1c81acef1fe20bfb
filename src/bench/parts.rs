//! What is measured while a step is made, part by part: time, memory, and what makes the host wait.

use tch::Device;

use crate::engine::{Event, MemoryByPart, Observer};
use crate::native::{SyncCounter, Syncs};
use crate::plan::StepPart;
use crate::plan::stopwatch::Stopwatch;
use crate::profile::Profiler;
use crate::report::console;
use crate::train::{MicroBatchPosition, StepCallback};
use crate::units::Bytes;

/// Watches the time of a step, and its memory where that is wanted.
pub(super) struct BenchWatch<'a> {
    pub(super) device: Device,
    /// Runs from the beginning of the step's micro-batch.
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

    pub(super) fn stop(mut self) -> [Syncs; 6] {
        self.turn(StepPart::Optimizer);
        self.parts
    }
}

impl BenchWatch<'_> {
    fn turn(&mut self, part: StepPart) {
        self.stopwatch.turn(part);
        if let Some(waits) = &mut self.waits {
            waits.turn(part);
        }
    }

    fn profile(&mut self, part: StepPart, memory: &dyn Fn() -> MemoryByPart) {
        if let Some(profiler) = &mut self.profiler {
            profiler.turn(part, memory());
            self.stopwatch.leave_out();
        }
    }
}

impl Observer for BenchWatch<'_> {
    fn note(&mut self, text: &str) {
        console::note(text);
    }

    fn observe(&mut self, event: Event) {
        self.turn(event.into());
    }

    fn measure(&mut self, event: Event, memory: &dyn Fn() -> MemoryByPart) {
        self.profile(event.into(), memory);
    }
}

impl StepCallback for BenchWatch<'_> {
    fn begin(&mut self, _at: MicroBatchPosition, memory: &dyn Fn() -> (MemoryByPart, Bytes)) {
        if let Some(profiler) = &mut self.profiler {
            let (held, accumulated) = memory();
            profiler.begin(held, accumulated);
        }
        self.stopwatch = Stopwatch::start(self.device);
    }

    fn optimizer(&mut self, memory: &dyn Fn() -> MemoryByPart) {
        self.turn(StepPart::Optimizer);
        self.profile(StepPart::Optimizer, memory);
    }
}
