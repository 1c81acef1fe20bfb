//! The memory of a run: of all its micro-batches the heaviest, part by part, and what the process took outside of steps.

use std::fmt;

use tch::Device;

use super::step::{MicroBatchPosition, StepCallback};
use crate::engine::{Event, MemoryByPart, Observer};
use crate::model::Model;
use crate::plan::StepPart;
use crate::profile::{MemoryProfile, Profiler, Side};
use crate::report::memory;
use crate::units::Bytes;

/// Watches the memory of a run from before its model is made.
pub(super) struct RunProfile {
    profiler: Profiler,
    /// The micro-batch that is under way, and whether the process' peak is its own.
    now: Option<(MicroBatchPosition, bool)>,
    /// For each memory the heaviest so far.
    heaviest: Vec<(MicroBatchPosition, MemoryProfile)>,
    /// Peaks of the process before the first step, and between and after them; `None` where they can't be told apart from those in steps.
    outside: [Option<Bytes>; 2],
    /// Whether the time since the last step has a peak of its own.
    was_reset: bool,
}

impl RunProfile {
    /// Begins to count; `None` where the system does not let us.
    pub(super) fn start(device: Device) -> Option<Self> {
        // The time before the first step began with the process.
        Some(Self { profiler: Profiler::start(device)?, now: None, heaviest: Vec::new(), outside: [None; 2], was_reset: true })
    }

    /// The model and the optimiser's state are there.
    pub(super) fn built(&mut self, model: &Model, optimizer: Bytes) {
        self.profiler.built(model, optimizer);
    }

    /// From now on the step is at `part`.
    fn turn(&mut self, part: StepPart, held: MemoryByPart) {
        self.profiler.turn(part, held);
    }

    /// A micro-batch begins, and the one before it in its step ends; the engine holds `held` at rest, and those before it have left so
    /// much of gradients.
    fn begin(&mut self, at: MicroBatchPosition, held: MemoryByPart, accumulated: Bytes) {
        if self.now.is_some() {
            self.end();
        } else {
            self.outside = self.outside_so_far();
        }
        self.now = Some((at, memory::reset_peak()));
        self.profiler.begin(held, accumulated);
    }

    fn end(&mut self) {
        let Some((at, was_reset)) = self.now.take() else { return };
        for profile in self.profiler.end(memory::peak(was_reset)) {
            match self.heaviest.iter_mut().find(|(_, heaviest)| heaviest.side == profile.side) {
                Some(heaviest) if height(&profile, was_reset) <= height(&heaviest.1, was_reset) => {}
                Some(heaviest) => *heaviest = (at, profile),
                None => self.heaviest.push((at, profile)),
            }
        }
        self.was_reset = memory::reset_peak();
    }

    fn outside_so_far(&self) -> [Option<Bytes>; 2] {
        let now = memory::peak(self.was_reset).filter(|peak| peak.was_reset).map(|peak| peak.resident);
        let [before, since] = self.outside;
        if self.heaviest.is_empty() { [before.max(now), since] } else { [before, since.max(now)] }
    }
}

/// What tells which of two micro-batches was heavier. Where the system lets no peak begin anew, and of a device, whose allocator keeps
/// what it has had, that is what tensors took.
fn height(profile: &MemoryProfile, was_reset: bool) -> i64 {
    let own = profile.measured.filter(|_| was_reset && profile.side != Side::Device).map(|bytes| bytes.0 as i64);
    own.unwrap_or_else(|| profile.by_part.into_iter().max().unwrap_or(0))
}

impl fmt::Display for RunProfile {
    /// A table for each memory, and the peaks that are in none.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (MicroBatchPosition { step, micro_batch: (index, count) }, profile) in &self.heaviest {
            let (side, part) = (profile.side.name(), profile.part.name());
            writeln!(f, "most memory ({side}) of all steps: in step {step}, micro-batch {} of {count}, {part}\n", index + 1)?;
            writeln!(f, "{profile}\n")?;
        }
        let words = |bytes: Option<Bytes>| bytes.map_or("not known".to_owned(), |bytes| bytes.to_string());
        let [before, since] = self.outside_so_far();
        write!(f, "peak of the process outside of steps: {} before the first (loading, planning, validation)", words(before))?;
        if self.heaviest.is_empty() {
            return Ok(());
        }
        write!(f, ", {} after it (validation, saving)", words(since))?;
        if self.was_reset {
            return Ok(());
        }
        write!(f, "; the system lets no peak begin anew, so that the measured one is that of the process' whole life")
    }
}

/// Watches a run's step: its events for whoever follows the run, and its memory where that is wanted.
pub(super) struct RunStepCallback<'a> {
    pub(super) observer: &'a mut dyn Observer,
    pub(super) profile: Option<&'a mut RunProfile>,
}

impl StepCallback for RunStepCallback<'_> {
    fn begin(&mut self, at: MicroBatchPosition, memory: &dyn Fn() -> (MemoryByPart, Bytes)) {
        if let Some(profile) = &mut self.profile {
            let (held, accumulated) = memory();
            profile.begin(at, held, accumulated);
        }
    }

    fn optimizer(&mut self, memory: &dyn Fn() -> MemoryByPart) {
        if let Some(profile) = &mut self.profile {
            profile.turn(StepPart::Optimizer, memory());
        }
    }

    fn end(&mut self) {
        if let Some(profile) = &mut self.profile {
            profile.end();
        }
    }
}

impl Observer for RunStepCallback<'_> {
    fn note(&mut self, text: &str) {
        self.observer.note(text);
    }

    fn observe(&mut self, event: Event) {
        self.observer.observe(event);
    }

    fn wants_to_stop(&self) -> bool {
        self.observer.wants_to_stop()
    }

    fn measure(&mut self, event: Event, memory: &dyn Fn() -> MemoryByPart) {
        self.observer.measure(event, memory);
        if let Some(profile) = &mut self.profile {
            profile.turn(event.into(), memory());
        }
    }
}
