//! The memory of steps by part: what the engine's objects hold, beside what the allocators have handed out and the system has given.
//!
//! At every event of the engine the meter notes what its parts hold and how much libtorch's allocators have out. Between two events the
//! allocators keep their own peak. The table is that of the span with the highest peak, in the heaviest micro-batch.

use std::fmt;

use tch::Device;

use super::{MemoryProfile, MemorySide, MicroBatchPosition};
use crate::engine::{MemoryByPart, MemoryPart};
use crate::model::{Adapter, Model};
use crate::native::cuda::DeviceStats;
use crate::native::{Allocated, AllocationMeter, peak_memory, reset_peak_memory};
use crate::plan::StepPart;
use crate::store::bytes_of;
use crate::units::Bytes;

/// Watches the memory of a process from before its model is made.
#[derive(Debug)]
pub struct MemoryMeter {
    allocations: AllocationMeter,
    memories: Vec<Memory>,
    /// The micro-batch that is under way.
    now: Option<MicroBatchPosition>,
    /// What the device's allocator had gone through before the micro-batch.
    before: Option<DeviceStats>,
    /// For each memory its heaviest micro-batch so far.
    heaviest: Vec<MemoryProfile>,
    /// The peak of the process in the last micro-batch.
    pub(crate) last_peak: Option<Bytes>,
    /// Peaks of the process before the first step, and between and after them; `None` where they can't be told apart from those in steps.
    outside: [Option<Bytes>; 2],
    /// Whether the peak of the process has begun anew after the last micro-batch.
    was_reset: bool,
}

/// What lives longer than a step.
#[derive(Clone, Copy, Debug, Default)]
struct Standing {
    weights: i64,
    optimizer: i64,
    /// Gradients of the micro-batches before.
    accumulated: i64,
    /// Weights that lie in a file's memory instead of an allocator's.
    mapped: i64,
}

/// The highest span of a micro-batch so far.
#[derive(Clone, Copy, Debug)]
struct Span {
    part: StepPart,
    held: MemoryByPart,
    peak: i64,
}

/// One memory during a micro-batch.
#[derive(Debug)]
struct Memory {
    side: MemorySide,
    standing: Standing,
    /// Where the step is, and what it held when it came there.
    part: StepPart,
    held: MemoryByPart,
    highest: Span,
    by_part: [i64; 6],
    /// The most that a caching allocator has held.
    reserved: i64,
}

impl MemoryMeter {
    /// Begins to count; `None` where libtorch does not let us.
    pub fn start(device: Device) -> Option<Self> {
        let sides: &[MemorySide] =
            if device == Device::Cpu { &[MemorySide::Process] } else { &[MemorySide::Device, MemorySide::Host] };
        Some(Self {
            allocations: AllocationMeter::start(device)?,
            memories: sides.iter().map(|&side| Memory::new(side)).collect(),
            now: None,
            before: None,
            heaviest: Vec::new(),
            last_peak: None,
            outside: [None; 2],
            // The time before the first step began with the process.
            was_reset: true,
        })
    }

    /// The model and the optimiser's state are there.
    pub fn built(&mut self, model: &Model, optimizer: Bytes) {
        let of_adapter = |adapter: Adapter| bytes_of(adapter.parameters().iter().map(|(_, matrix)| matrix)).0 as i64;
        let adapter = model.adapter().map_or(0, of_adapter);
        let (base, optimizer) = (model.weight_bytes().0 as i64, optimizer.0 as i64);
        let (host, device) = self.allocations.read();
        for memory in self.memories.iter_mut().filter(|memory| memory.side.has_model()) {
            let live = memory.side.count(host, device).live;
            let mapped = (base + adapter + optimizer - live).clamp(0, base);
            memory.standing = Standing { weights: base + adapter, optimizer, accumulated: 0, mapped };
        }
    }

    /// A micro-batch begins, and the one before it in its step ends. The engine holds `held` at rest, and the earlier ones have left
    /// `accumulated` bytes of gradients.
    pub fn begin(&mut self, at: MicroBatchPosition, held: MemoryByPart, accumulated: Bytes) {
        if self.now.is_some() {
            self.end();
        } else {
            self.outside = self.outside_so_far();
        }
        self.now = Some(at);
        self.was_reset = reset_peak_memory();
        self.allocations.reset_peak();
        self.before = self.allocations.of_allocator();
        self.memories.iter_mut().for_each(|memory| memory.begin(held, accumulated.0 as i64));
    }

    /// From now on the step is at `part`, where the engine holds `held`.
    pub fn turn(&mut self, part: StepPart, held: MemoryByPart) {
        self.close_span();
        self.allocations.reset_peak();
        self.memories.iter_mut().for_each(|memory| (memory.part, memory.held) = (part, held));
    }

    /// The micro-batch has ended, and its step where it was the last.
    pub fn end(&mut self) {
        let Some(at) = self.now.take() else { return };
        self.close_span();
        self.last_peak = peak_memory().map(Bytes);
        let (now, comparable) = (self.allocations.of_allocator(), self.was_reset);
        for memory in &self.memories {
            let allocator = memory.side.allocator(now, self.before);
            let profile = memory.profile(at, self.last_peak, allocator);
            match self.heaviest.iter_mut().find(|heaviest| heaviest.side == profile.side) {
                Some(heaviest) if height(&profile, comparable) <= height(heaviest, comparable) => {}
                Some(heaviest) => *heaviest = profile,
                None => self.heaviest.push(profile),
            }
        }
        self.was_reset = reset_peak_memory();
    }

    /// Takes the tables of the micro-batches so far.
    pub fn take(&mut self) -> Vec<MemoryProfile> {
        std::mem::take(&mut self.heaviest)
    }

    fn close_span(&mut self) {
        let (host, device) = self.allocations.read();
        self.memories.iter_mut().for_each(|memory| memory.close_span(memory.side.count(host, device)));
    }

    fn outside_so_far(&self) -> [Option<Bytes>; 2] {
        let now = peak_memory().map(Bytes).filter(|_| self.was_reset);
        let [before, since] = self.outside;
        if self.heaviest.is_empty() { [before.max(now), since] } else { [before, since.max(now)] }
    }
}

/// What tells which of two micro-batches was heavier. Where the system lets no peak begin anew, and of a device, whose allocator keeps
/// what it has had, that is what tensors took.
fn height(profile: &MemoryProfile, was_reset: bool) -> i64 {
    let own = profile.measured.filter(|_| was_reset && profile.side != MemorySide::Device).map(|bytes| bytes.0 as i64);
    own.unwrap_or_else(|| profile.most_tensors())
}

impl Memory {
    fn new(side: MemorySide) -> Self {
        let (part, held) = (StepPart::Forward, MemoryByPart::default());
        let highest = Span { part, held, peak: 0 };
        Self { side, standing: Standing::default(), part, held, highest, by_part: [0; 6], reserved: 0 }
    }

    fn begin(&mut self, held: MemoryByPart, accumulated: i64) {
        let accumulated = if self.side.has_model() { accumulated } else { 0 };
        let standing = Standing { accumulated, ..self.standing };
        *self = Self { standing, held, highest: Span { part: StepPart::Forward, held, peak: i64::MIN }, ..Self::new(self.side) };
    }

    /// A span is over: it may have been the highest.
    fn close_span(&mut self, count: Allocated) {
        // What stores have asked for and never touched is in the allocators' counts of the host.
        let untouched = if self.side == MemorySide::Device { 0 } else { self.held.untouched.0 as i64 };
        let peak = count.peak - untouched + self.standing.mapped;
        let most = &mut self.by_part[self.part as usize];
        *most = (*most).max(peak);
        self.reserved = self.reserved.max(count.reserved);
        if peak > self.highest.peak {
            self.highest = Span { part: self.part, held: self.held, peak };
        }
    }

    fn profile(&self, at: MicroBatchPosition, peak: Option<Bytes>, allocator: Vec<(&'static str, i64)>) -> MemoryProfile {
        let (Standing { weights, optimizer, accumulated, .. }, highest) = (self.standing, self.highest);
        let held = |part| self.side.places().iter().map(|&place| highest.held.get(part, place).0 as i64).sum::<i64>();
        let mut parts = MemoryPart::ALL.map(held);
        let mut add = |part: MemoryPart, bytes| parts[part as usize] += bytes;
        add(MemoryPart::Weights, weights);
        add(MemoryPart::OptimizerState, optimizer);
        add(MemoryPart::Gradients, accumulated);
        let activations = highest.peak - parts.iter().sum::<i64>();
        parts[MemoryPart::Activations as usize] = activations;
        let measured = match self.side {
            MemorySide::Device => Some(Bytes(self.reserved.max(0) as u64)),
            MemorySide::Process | MemorySide::Host => peak,
        };
        parts[MemoryPart::Process as usize] = measured.map_or(0, |measured| measured.0 as i64 - highest.peak);
        let (side, part, by_part) = (self.side, highest.part, self.by_part);
        MemoryProfile { at, side, part, parts, measured, by_part, allocator }
    }
}

impl fmt::Display for MemoryMeter {
    /// A table for each memory, and the peaks that are in none.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for profile in &self.heaviest {
            let (side, part, MicroBatchPosition { step, micro_batch: (index, count) }) =
                (profile.side.name(), profile.part.name(), profile.at);
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

#[cfg(test)]
mod tests {
    use tch::{Kind, Tensor};

    use super::*;
    use crate::engine::MemoryPlace;

    fn zeros(bytes: i64) -> Tensor {
        Tensor::zeros([bytes], (Kind::Uint8, Device::Cpu))
    }

    fn held(part: MemoryPart, bytes: u64) -> MemoryByPart {
        let mut memory = MemoryByPart::default();
        memory.add(part, MemoryPlace::Host, Bytes(bytes));
        memory
    }

    fn at(index: usize) -> MicroBatchPosition {
        MicroBatchPosition { step: 1, micro_batch: (index, 2) }
    }

    #[test]
    fn what_was_accumulated_is_a_gradient() {
        let mut meter = MemoryMeter::start(Device::Cpu).unwrap();
        let before = (zeros(4096), zeros(256));
        meter.begin(at(0), held(MemoryPart::UndoLog, 256), Bytes(4096));
        let entries = zeros(64);
        meter.turn(StepPart::Forward, held(MemoryPart::UndoLog, 320));
        drop(zeros(1000));
        meter.end();
        let found = meter.take().remove(0);
        let tensors: Vec<(&str, i64)> =
            MemoryPart::ALL[..7].iter().map(|part| part.name()).zip(found.parts).filter(|(_, bytes)| *bytes != 0).collect();
        let expected = [("gradients", 4096), ("undo log", 320), ("activations", 1000)];
        assert_eq!((found.part, &tensors[..]), (StepPart::Forward, &expected[..]));
        assert_eq!(found.by_part[StepPart::Forward as usize], 4096 + 320 + 1000);
        assert_eq!(found.parts.iter().sum::<i64>(), found.measured.unwrap().0 as i64);

        // The next begins with its own.
        drop((before, entries));
        meter.begin(at(1), MemoryByPart::default(), Bytes(0));
        meter.end();
        assert_eq!(meter.take().remove(0).most_tensors(), 0);
    }
}
