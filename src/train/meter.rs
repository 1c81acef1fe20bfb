//! Measures steps while they are made: their time by part, and their memory where that is wanted; and holds the process to its plan.

use crate::engine::{Event, MemoryByPart, Observer};
use crate::measure::{MemoryMeter, MicroBatchPosition, Stopwatch};
use crate::native::give_free_memory_back;
use crate::plan::StepPart;
use crate::report::memory::resident;
use crate::units::Bytes;

/// Tells an observer of a step, and measures it.
pub struct StepMeter<'a> {
    pub(super) observer: &'a mut dyn Observer,
    /// Runs from the beginning of the step's last micro-batch.
    pub(super) stopwatch: Option<&'a mut Stopwatch>,
    pub(super) memory: Option<&'a mut MemoryMeter>,
    pub(super) limit: Option<&'a mut ResidentLimit>,
}

/// The size to which the process may grow by memory that was freed and that the allocator keeps: it does not serve tensors of other sizes, as
/// sequences of different lengths have them.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResidentLimit(pub(super) Bytes);

impl ResidentLimit {
    /// Gives freed memory back to the system where the process has grown beyond the limit.
    fn hold(&mut self) {
        let Some(before) = resident().filter(|size| *size > self.0) else { return };
        give_free_memory_back();
        // Tensors themselves take more than was planned: only what is larger than this makes the peak larger.
        if resident().is_none_or(|after| after > self.0) {
            self.0 = before;
        }
    }
}

impl<'a> StepMeter<'a> {
    /// Tells the observer, and measures nothing.
    pub fn of(observer: &'a mut dyn Observer) -> Self {
        Self { observer, stopwatch: None, memory: None, limit: None }
    }

    /// A micro-batch begins; `memory` says what the engine holds at rest, and how much of gradients the earlier ones have left.
    pub(super) fn begin(&mut self, at: MicroBatchPosition, memory: &dyn Fn() -> (MemoryByPart, Bytes)) {
        if let Some(meter) = &mut self.memory {
            let (held, accumulated) = memory();
            meter.begin(at, held, accumulated);
        }
        if let Some(stopwatch) = &mut self.stopwatch {
            stopwatch.restart();
        }
    }

    /// All gradients are there, and `memory` with them; clipping and the update follow.
    pub(super) fn optimizer(&mut self, memory: &dyn Fn() -> MemoryByPart) {
        self.turn(StepPart::Optimizer);
        self.measure_memory(|meter| meter.turn(StepPart::Optimizer, memory()));
    }

    pub(super) fn end(&mut self) {
        self.turn(StepPart::Optimizer);
        self.measure_memory(MemoryMeter::end);
    }

    fn turn(&mut self, part: StepPart) {
        if let Some(stopwatch) = &mut self.stopwatch {
            stopwatch.turn(part);
        }
    }

    /// Takes no time of the step.
    fn measure_memory(&mut self, measure: impl FnOnce(&mut MemoryMeter)) {
        let Some(memory) = &mut self.memory else { return };
        measure(memory);
        if let Some(stopwatch) = &mut self.stopwatch {
            stopwatch.leave_out();
        }
    }
}

impl Observer for StepMeter<'_> {
    fn note(&mut self, text: &str) {
        self.observer.note(text);
    }

    fn observe(&mut self, event: Event) {
        self.observer.observe(event);
        if let Some(limit) = &mut self.limit {
            limit.hold();
        }
        self.turn(event.into());
    }

    fn wants_to_stop(&self) -> bool {
        self.observer.wants_to_stop()
    }

    fn measure(&mut self, event: Event, memory: &dyn Fn() -> MemoryByPart) {
        self.observer.measure(event, memory);
        self.measure_memory(|meter| meter.turn(event.into(), memory()));
    }
}
