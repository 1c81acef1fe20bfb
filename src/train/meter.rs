//! Measures steps while they are made: their time by part, and their memory where that is wanted; and holds the process to its plan.

use crate::engine::{Event, MemoryByPart, Observer};
use crate::measure::{MemoryMeter, MicroBatchPosition, Stopwatch};
use crate::native::{give_free_memory_back, resident_memory};
use crate::plan::StepPart;
use crate::units::Bytes;

/// Tells an observer of a step, and measures it.
pub struct StepMeter<'a> {
    pub(super) observer: &'a mut dyn Observer,
    /// Runs from the beginning of the step's last micro-batch.
    pub(super) stopwatch: Option<&'a mut Stopwatch>,
    pub(super) memory: Option<&'a mut MemoryMeter>,
    /// The resident size above which freed memory is given back; raised a little above what the process had then.
    pub(super) limit: Option<&'a mut Bytes>,
}

/// After freed memory was given back, a process may grow by one part in so many before that happens again.
const SLACK: u64 = 100;

/// Gives freed memory back to the system where the process is larger than `limit`: kept, it serves no tensors of other sizes, as of longer sequences.
fn hold(limit: &mut Bytes) {
    let Some(size) = resident_memory().map(Bytes).filter(|size| *size > *limit) else { return };
    give_free_memory_back();
    // What is in use may be above the plan for good. What was given back returns as fresh pages, which would take a tenth of a long step if
    // each page more counted, and so every cell gave memory back.
    *limit = Bytes(size.0 + size.0 / SLACK);
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

    fn observe(&mut self, event: Event, memory: &dyn Fn() -> MemoryByPart) {
        self.observer.observe(event, memory);
        if let Some(limit) = &mut self.limit {
            hold(limit);
        }
        self.turn(event.into());
        self.measure_memory(|meter| meter.turn(event.into(), memory()));
    }

    fn wants_to_stop(&self) -> bool {
        self.observer.wants_to_stop()
    }
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::process::Command;

    use tch::{Device, Kind, Tensor};

    use super::*;

    const NAME: &str = "train::meter::tests::freed_memory_goes_back_where_the_process_grows_beyond_its_limit";
    const ALONE: &str = "KVTUNE_TEST_ALONE";
    const LARGE: u64 = 1 << 28;

    /// In a process of its own: other tests take memory and give it back.
    #[test]
    fn freed_memory_goes_back_where_the_process_grows_beyond_its_limit() {
        if env::var_os(ALONE).is_none() {
            let mut alone = Command::new(env::current_exe().unwrap());
            let said = alone.args([NAME, "--exact"]).env(ALONE, "1").output().unwrap();
            let words = String::from_utf8_lossy(&said.stdout);
            assert!(said.status.success() && words.contains("1 passed"), "{words}");
            return;
        }
        let before = resident_memory().unwrap();
        drop(Tensor::ones([LARGE as i64], (Kind::Uint8, Device::Cpu)));
        let mut limit = Bytes(before + 2 * LARGE);
        hold(&mut limit);
        assert!(resident_memory().unwrap() > before + LARGE / 2, "the allocator keeps what is freed, below the limit");
        limit = Bytes(before);
        hold(&mut limit);
        assert!(resident_memory().unwrap() < before + LARGE / 2);
        assert!(limit.0 > before + LARGE / 2, "what has been reached is the limit");
    }
}
