//! The memory of a step by part: what the engine's objects hold, beside what the allocators have handed out and the system has given.
//!
//! At every event of the engine the profile notes what its parts hold and how much libtorch's allocators have out. Between two
//! events the allocators keep their own peak. The table is that of the span with the highest peak.

use serde_json::{Value, json};
use tch::Device;

use crate::engine::{MemoryByPart, Place};
use crate::model::{Adapter, Model};
use crate::native::{Allocated, AllocationMeter};
use crate::plan::Part;
use crate::report::memory::{Peak, Resident, resident};
use crate::store::bytes_of;
use crate::units::Bytes;

/// Which memory a table is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// All of the process, where the CPU computes.
    Process,
    /// The host's, beside a device.
    Host,
    /// The device's.
    Device,
}

impl Side {
    /// The name in tables and keys.
    pub fn name(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Host => "host",
            Self::Device => "device",
        }
    }

    fn holds(self, place: Place) -> bool {
        match self {
            Self::Process => true,
            Self::Host => place == Place::Host,
            Self::Device => place == Place::Device,
        }
    }

    fn count(self, (host, device): (Allocated, Allocated)) -> Allocated {
        if self == Self::Device { device } else { host }
    }
}

/// The table of one memory. The rows add up to `measured`, where that could be had.
#[derive(Clone, Debug)]
pub struct MemoryProfile {
    /// Which memory.
    pub side: Side,
    /// The part of the step in which the peak was.
    pub part: Part,
    /// Parts and bytes; those that are no object of the engine's are what the allocators say beyond the objects.
    pub rows: Vec<(String, i64)>,
    /// The peak as the system (on a device: its allocator) tells it.
    pub measured: Option<Bytes>,
    /// The most that tensors took in each part of the step, in the order of [`Part::ALL`].
    pub by_part: [i64; 6],
}

impl MemoryProfile {
    /// The line of the table.
    pub fn to_json(&self) -> Value {
        let rows: Vec<Value> = self.rows.iter().map(|(part, bytes)| json!({ "part": part, "bytes": bytes })).collect();
        let by_part = Part::ALL.into_iter().zip(self.by_part).map(|(part, bytes)| (part.name().to_owned(), json!(bytes)));
        json!({
            "kind": "memory", "memory": self.side.name(), "peak_in": self.part.name(), "rows": rows,
            "measured_peak_bytes": self.measured.map(|bytes| bytes.0), "tensor_peak_bytes_by_part": Value::Object(by_part.collect()),
        })
    }
}

/// What lives longer than a step.
#[derive(Clone, Copy, Debug, Default)]
struct Standing {
    weights: i64,
    adapter: i64,
    optimizer: i64,
    /// Of these what lies in a file's memory instead of an allocator's.
    mapped: i64,
}

/// A point of a step.
#[derive(Clone, Copy, Debug)]
struct Point {
    part: Part,
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
}

/// Watches the memory of a process from before its model is made.
#[derive(Debug)]
pub(super) struct Profiler {
    meter: AllocationMeter,
    /// Of the process at the start: the program, libtorch and its threads.
    baseline: Resident,
    sides: Vec<Tracked>,
}

impl Profiler {
    /// Begins to count; `None` where libtorch does not let us.
    pub(super) fn start(device: Device) -> Option<Self> {
        let sides: &[Side] = if device == Device::Cpu { &[Side::Process] } else { &[Side::Device, Side::Host] };
        let (baseline, meter) = (resident()?, AllocationMeter::start()?);
        Some(Self { meter, baseline, sides: sides.iter().map(|&side| Tracked::new(side)).collect() })
    }

    /// The model and the optimiser's state are there.
    pub(super) fn built(&mut self, model: &Model, optimizer: Bytes) {
        let of_adapter = |adapter: &Adapter| bytes_of(adapter.parameters().iter().map(|(_, matrix)| matrix)).0 as i64;
        let adapter = model.adapter().map_or(0, of_adapter);
        let (weights, optimizer) = (model.weight_bytes().0 as i64, optimizer.0 as i64);
        for side in self.sides.iter_mut().filter(|side| side.side.holds(Place::Device)) {
            let live = side.side.count(self.meter.read()).live;
            let mapped = (weights + adapter + optimizer - live).clamp(0, weights);
            side.standing = Standing { weights, adapter, optimizer, mapped };
        }
    }

    /// From now on the step is at `part`.
    pub(super) fn turn(&mut self, part: Part, held: MemoryByPart) {
        let counts = self.meter.read();
        self.sides.iter_mut().for_each(|side| side.turn(part, held, side.side.count(counts)));
        self.meter.reset_peak();
    }

    /// A step begins.
    pub(super) fn begin(&mut self) {
        self.meter.reset_peak();
        let counts = self.meter.read();
        self.sides.iter_mut().for_each(|side| side.begin(side.side.count(counts).live));
    }

    /// The step has ended; `peak` is the process'.
    pub(super) fn end(&mut self, peak: Option<Peak>) -> Vec<MemoryProfile> {
        self.turn(Part::Optimizer, MemoryByPart::default());
        let counts = self.meter.read();
        self.sides.iter().map(|side| side.profile(side.side.count(counts), self.baseline, peak)).collect()
    }

    /// The most that the device's allocator has had out since the last [`Self::begin`].
    pub(super) fn device_peak(&self) -> Option<Bytes> {
        let device = self.sides.iter().find(|side| side.side == Side::Device)?;
        Some(Bytes(device.by_part.iter().copied().max().unwrap_or(0).max(0) as u64))
    }
}

impl Tracked {
    fn new(side: Side) -> Self {
        let point = Point { part: Part::Forward, held: MemoryByPart::default(), live: 0, unowned: 0 };
        Self { side, standing: Standing::default(), point, highest: (point, 0), by_part: [0; 6], untouched: 0 }
    }

    fn begin(&mut self, live: i64) {
        let live = live - self.untouched;
        let unowned = live - self.owned(&MemoryByPart::default());
        self.point = Point { part: Part::Forward, held: MemoryByPart::default(), live, unowned };
        (self.highest, self.by_part) = ((self.point, live), [0; 6]);
    }

    /// What objects hold that we know, in allocators' memory.
    fn owned(&self, held: &MemoryByPart) -> i64 {
        let Standing { weights, adapter, optimizer, mapped } = self.standing;
        let of_engine = held.rows().iter().filter(|row| self.side.holds(row.place)).map(|row| row.bytes.0 as i64).sum::<i64>();
        weights + adapter + optimizer - mapped + of_engine
    }

    fn turn(&mut self, part: Part, held: MemoryByPart, count: Allocated) {
        // The optimiser does not look into the engine, whose stores stay what they were.
        if part != Part::Optimizer && self.side.holds(Place::Host) {
            self.untouched = held.untouched.0 as i64;
        }
        let (live, peak) = (count.live - self.untouched, count.peak - self.untouched);
        let most = &mut self.by_part[self.point.part as usize];
        *most = (*most).max(peak + self.standing.mapped);
        if peak > self.highest.1 {
            self.highest = (self.point, peak);
        }
        // In the middle of a cell, what nobody owns is its graph; what was there before stays what it was.
        let in_cell = part == Part::Backward || (part == Part::Head && self.point.part == Part::Recompute);
        let unowned = if in_cell { self.point.unowned } else { live - self.owned(&held) };
        self.point = Point { part, held, live, unowned };
    }

    /// What was resident before there was a tensor, and what the system has read in since of libraries and other files.
    fn beside_tensors(&self, baseline: Resident) -> (i64, i64) {
        let now = resident().filter(|_| self.side != Side::Device);
        now.map_or((0, 0), |now| (baseline.all.0 as i64, now.files.0 as i64 - baseline.files.0 as i64 - self.standing.mapped))
    }

    fn profile(&self, count: Allocated, baseline: Resident, peak: Option<Peak>) -> MemoryProfile {
        let (point, most) = self.highest;
        let mut rows: Vec<(String, i64)> = Vec::new();
        let mut add = |name: &str, bytes: i64| rows.push((name.to_owned(), bytes));
        if self.side.holds(Place::Device) {
            add("weights", self.standing.weights);
            add("adapter", self.standing.adapter);
            add("optimizer state", self.standing.optimizer);
        }
        for row in point.held.rows().iter().filter(|row| self.side.holds(row.place)) {
            add(row.name, row.bytes.0 as i64);
        }
        if self.side.holds(Place::Device) {
            add("graph of the cell", point.live - point.unowned - self.owned(&point.held));
        }
        add(&format!("inside {}", point.part.name()), most - point.live);
        add("other tensors", point.unowned);
        let measured = match self.side {
            Side::Device => Some(Bytes(count.reserved.max(0) as u64)),
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
        MemoryProfile { side: self.side, part: point.part, rows, measured, by_part: self.by_part }
    }
}
