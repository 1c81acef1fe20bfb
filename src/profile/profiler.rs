//! The memory of a step by part: what the engine's objects hold, beside what the allocators have handed out and the system has given.
//!
//! At every event of the engine the profile notes what its parts hold and how much libtorch's allocators have out. Between two
//! events the allocators keep their own peak. The table is that of the span with the highest peak.

use tch::Device;

use super::{MemoryProfile, Side};
use crate::engine::{MemoryByPart, MemoryPlace};
use crate::model::{Adapter, Model};
use crate::native::cuda::DeviceStats;
use crate::native::{Allocated, AllocationMeter};
use crate::plan::StepPart;
use crate::report::memory::{Resident, ResidentPeak, resident};
use crate::store::bytes_of;
use crate::units::Bytes;

/// What lives longer than a step.
#[derive(Clone, Copy, Debug, Default)]
struct Standing {
    weights: i64,
    adapter: i64,
    optimizer: i64,
    /// Gradients of the micro-batches before.
    accumulated: i64,
    /// Of the first three what lies in a file's memory instead of an allocator's.
    mapped: i64,
}

/// A point of a step.
#[derive(Clone, Copy, Debug)]
struct Point {
    part: StepPart,
    held: MemoryByPart,
    live: i64,
    /// Tensors without an owner that we know, when no cell's graph was alive.
    unowned: i64,
}

/// One memory during a step.
#[derive(Debug)]
struct Tracked {
    side: Side,
    standing: Standing,
    point: Point,
    highest: (Point, i64),
    by_part: [i64; 6],
    /// What the allocators count of memory that nobody has touched.
    untouched: i64,
    /// The most that a caching allocator has held.
    reserved: i64,
}

/// Watches the memory of a process from before its model is made.
#[derive(Debug)]
pub struct Profiler {
    meter: AllocationMeter,
    /// Of the process at the start: the program, libtorch and its threads.
    baseline: Resident,
    sides: Vec<Tracked>,
    /// What the device's allocator had gone through before the micro-batch.
    before: Option<DeviceStats>,
}

impl Profiler {
    /// Begins to count; `None` where libtorch does not let us.
    pub fn start(device: Device) -> Option<Self> {
        let sides: &[Side] = if device == Device::Cpu { &[Side::Process] } else { &[Side::Device, Side::Host] };
        let (baseline, meter) = (resident()?, AllocationMeter::start(device)?);
        Some(Self { meter, baseline, sides: sides.iter().map(|&side| Tracked::new(side)).collect(), before: None })
    }

    /// The model and the optimiser's state are there.
    pub fn built(&mut self, model: &Model, optimizer: Bytes) {
        let of_adapter = |adapter: Adapter| bytes_of(adapter.parameters().iter().map(|(_, matrix)| matrix)).0 as i64;
        let adapter = model.adapter().map_or(0, of_adapter);
        let (weights, optimizer) = (model.weight_bytes().0 as i64, optimizer.0 as i64);
        for side in self.sides.iter_mut().filter(|side| side.side.holds(MemoryPlace::Device)) {
            let live = side.side.count(self.meter.read()).live;
            let mapped = (weights + adapter + optimizer - live).clamp(0, weights);
            side.standing = Standing { weights, adapter, optimizer, accumulated: 0, mapped };
        }
    }

    /// From now on the step is at `part`.
    pub fn turn(&mut self, part: StepPart, held: MemoryByPart) {
        let counts = self.meter.read();
        self.sides.iter_mut().for_each(|side| side.turn(part, held, side.side.count(counts)));
        self.meter.reset_peak();
    }

    /// A micro-batch begins; the engine holds `held` at rest, and those before it in its step have left so much of gradients.
    pub fn begin(&mut self, held: MemoryByPart, accumulated: Bytes) {
        self.meter.reset_peak();
        let counts = self.meter.read();
        self.before = self.meter.of_allocator();
        for side in &mut self.sides {
            if side.side.holds(MemoryPlace::Device) {
                side.standing.accumulated = accumulated.0 as i64;
            }
            side.begin(held, side.side.count(counts).live);
        }
    }

    /// The micro-batch has ended, and its step where it was the last; `peak` is the process'.
    pub fn end(&mut self, peak: Option<ResidentPeak>) -> Vec<MemoryProfile> {
        let (counts, baseline) = (self.meter.read(), self.baseline);
        let (now, before) = (self.meter.of_allocator(), self.before);
        let profile = |side: &mut Tracked| {
            side.close(side.side.count(counts));
            let allocator = side.side.allocator(now, before);
            MemoryProfile { allocator, ..side.profile(baseline, peak) }
        };
        self.sides.iter_mut().map(profile).collect()
    }

    /// The most that the device's allocator has had out since the last [`Self::begin`].
    pub fn device_peak(&self) -> Option<Bytes> {
        let device = self.sides.iter().find(|side| side.side == Side::Device)?;
        Some(Bytes(device.by_part.iter().copied().max().unwrap_or(0).max(0) as u64))
    }
}

impl Tracked {
    fn new(side: Side) -> Self {
        let point = Point { part: StepPart::Forward, held: MemoryByPart::default(), live: 0, unowned: 0 };
        Self { side, standing: Standing::default(), point, highest: (point, 0), by_part: [0; 6], untouched: 0, reserved: 0 }
    }

    fn begin(&mut self, held: MemoryByPart, live: i64) {
        self.see_untouched(&held);
        let live = live - self.untouched;
        self.point = Point { part: StepPart::Forward, held, live, unowned: live - self.owned(&held) };
        (self.highest, self.by_part, self.reserved) = ((self.point, live), [0; 6], 0);
    }

    /// What objects hold that we know, in allocators' memory.
    fn owned(&self, held: &MemoryByPart) -> i64 {
        let Standing { weights, adapter, optimizer, accumulated, mapped } = self.standing;
        let of_engine = held.entries().iter().filter(|row| self.side.holds(row.place)).map(|row| row.bytes.0 as i64).sum::<i64>();
        weights + adapter + optimizer + accumulated - mapped + of_engine
    }

    fn turn(&mut self, part: StepPart, held: MemoryByPart, count: Allocated) {
        self.see_untouched(&held);
        let live = self.close(count);
        // In the middle of a cell, and where cells are kept, what nobody owns is their graphs; what was there before stays what it was.
        let in_cell = held.kept_cells > 0
            || part == StepPart::Backward
            || (part == StepPart::Head && self.point.part == StepPart::Recompute);
        let unowned = if in_cell { self.point.unowned } else { live - self.owned(&held) };
        self.point = Point { part, held, live, unowned };
    }

    fn see_untouched(&mut self, held: &MemoryByPart) {
        if self.side.holds(MemoryPlace::Host) {
            self.untouched = held.untouched.0 as i64;
        }
    }

    /// A span is over: it may have been the highest. Returns what is live now.
    fn close(&mut self, count: Allocated) -> i64 {
        let (live, peak) = (count.live - self.untouched, count.peak - self.untouched);
        let most = &mut self.by_part[self.point.part as usize];
        *most = (*most).max(peak + self.standing.mapped);
        self.reserved = self.reserved.max(count.reserved);
        if peak > self.highest.1 {
            self.highest = (self.point, peak);
        }
        live
    }

    /// What was resident before there was a tensor, and what the system has read in since of libraries and other files.
    fn beside_tensors(&self, baseline: Resident) -> (i64, i64) {
        let now = resident().filter(|_| self.side != Side::Device);
        now.map_or((0, 0), |now| (baseline.all.0 as i64, now.files.0 as i64 - baseline.files.0 as i64 - self.standing.mapped))
    }

    fn profile(&self, baseline: Resident, peak: Option<ResidentPeak>) -> MemoryProfile {
        let (point, most) = self.highest;
        let mut parts: Vec<(String, i64)> = Vec::new();
        let mut add = |name: &str, bytes: i64| parts.push((name.to_owned(), bytes));
        if self.side.holds(MemoryPlace::Device) {
            add("weights", self.standing.weights);
            add("adapter", self.standing.adapter);
            add("optimizer state", self.standing.optimizer);
            add("accumulated gradients", self.standing.accumulated);
        }
        for row in point.held.entries().iter().filter(|row| self.side.holds(row.place)) {
            add(row.name, row.bytes.0 as i64);
        }
        if self.side.holds(MemoryPlace::Device) {
            add("graph of the cell", point.live - point.unowned - self.owned(&point.held));
        }
        add(&format!("inside {}", point.part.name()), most - point.live);
        add("other tensors", point.unowned);
        let measured = match self.side {
            Side::Device => Some(Bytes(self.reserved.max(0) as u64)),
            Side::Process | Side::Host => peak.map(|peak| peak.resident),
        };
        if let Some(measured) = measured {
            let (start, code) = self.beside_tensors(baseline);
            if self.side != Side::Device {
                add("process at its start", start);
                add("code and files since", code);
            }
            add("allocator and rest", measured.0 as i64 - start - code - most - self.standing.mapped);
        }
        MemoryProfile { side: self.side, part: point.part, parts, measured, by_part: self.by_part, allocator: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use tch::{Kind, Tensor};

    use super::*;

    fn zeros(bytes: i64) -> Tensor {
        Tensor::zeros([bytes], (Kind::Uint8, Device::Cpu))
    }

    #[test]
    fn what_was_accumulated_is_nobody_elses() {
        let mut profiler = Profiler::start(Device::Cpu).unwrap();
        let before = (zeros(4096), zeros(256));
        profiler.begin(MemoryByPart { free_room: Bytes(256), ..MemoryByPart::default() }, Bytes(4096));
        let tokens = zeros(64);
        profiler.turn(StepPart::Forward, MemoryByPart { free_room: Bytes(256), tokens: Bytes(64), ..MemoryByPart::default() });
        drop(zeros(1000));
        let found = profiler.end(None).remove(0);
        let parts: Vec<(&str, i64)> =
            found.parts.iter().map(|(name, bytes)| (name.as_str(), *bytes)).filter(|(_, bytes)| *bytes != 0).collect();
        let expected = [("accumulated gradients", 4096), ("free room of stores", 256), ("tokens", 64), ("inside forward", 1000)];
        assert_eq!((found.part, &parts[..], found.measured), (StepPart::Forward, &expected[..], None));
        assert_eq!(found.by_part[StepPart::Forward as usize], 4096 + 256 + 64 + 1000);

        // The next begins with its own.
        drop((before, tokens));
        profiler.begin(MemoryByPart::default(), Bytes(0));
        let found = profiler.end(None).remove(0);
        assert_eq!(found.parts.iter().map(|(_, bytes)| bytes).sum::<i64>(), 0);
    }
}
