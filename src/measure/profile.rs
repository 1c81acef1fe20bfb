//! The table of a memory: what a step took of it at its peak, part by part.

use std::fmt;

use serde_json::{Value, json};

use crate::engine::{MemoryPart, MemoryPlace};
use crate::native::Allocated;
use crate::native::cuda::{DeviceStats, pinned_stats};
use crate::plan::StepPart;
use crate::report::table::Table;
use crate::units::Bytes;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatchPosition {
    /// The number of the step, from 1.
    pub step: u64,
    /// The index of the micro-batch, and how many this rank has in the step.
    pub micro_batch: (usize, usize),
}

/// Which memory a table is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemorySide {
    /// All of the process, where the CPU computes.
    Process,
    /// The host's memory, beside a device.
    Host,
    Device,
}

impl MemorySide {
    pub fn name(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Host => "host",
            Self::Device => "device",
        }
    }

    pub(super) fn places(self) -> &'static [MemoryPlace] {
        match self {
            Self::Process => &[MemoryPlace::Device, MemoryPlace::Host],
            Self::Host => &[MemoryPlace::Host],
            Self::Device => &[MemoryPlace::Device],
        }
    }

    pub(super) fn has_model(self) -> bool {
        self != Self::Host
    }

    /// What the caching allocator of this memory says beside its bytes: how it fared since `before`, or what it has pinned.
    pub(super) fn allocator(self, now: Option<DeviceStats>, before: Option<DeviceStats>) -> Vec<(&'static str, i64)> {
        match (self, now) {
            (Self::Device, Some(now)) => {
                let before = before.unwrap_or_default();
                let [retries, failures] = [now.retries - before.retries, now.failures - before.failures];
                vec![("allocation_retries", retries), ("allocation_failures", failures)]
            }
            (Self::Host, Some(_)) => {
                let pinned = pinned_stats().map(|(now, most)| [("pinned_bytes", now), ("pinned_peak_bytes", most)]);
                pinned.into_iter().flatten().collect()
            }
            _ => Vec::new(),
        }
    }

    /// The count of this memory among those of host and device.
    pub(super) fn count(self, host: Allocated, device: Allocated) -> Allocated {
        if self == Self::Device { device } else { host }
    }
}

/// One memory during the micro-batch in which it was highest.
#[derive(Clone, Debug)]
pub struct MemoryProfile {
    pub at: MicroBatchPosition,
    pub side: MemorySide,
    pub part: StepPart,
    /// Bytes in the order of [`MemoryPart::ALL`]. They add up to `measured`; where that is not known, nothing is the process'.
    pub parts: [i64; MemoryPart::ALL.len()],
    /// The peak as the system (on a device: its allocator) tells it.
    pub measured: Option<Bytes>,
    /// The most that tensors took in each part of the step, in the order of [`StepPart::ALL`].
    pub by_part: [i64; 6],
    /// What a caching allocator says of itself, by its keys; nothing where there is none.
    pub allocator: Vec<(&'static str, i64)>,
}

impl MemoryProfile {
    fn rows(&self) -> impl Iterator<Item = (&'static str, i64)> {
        MemoryPart::ALL.into_iter().map(|(_, name)| name).zip(self.parts)
    }

    pub fn most_tensors(&self) -> i64 {
        self.by_part.into_iter().max().unwrap_or(0)
    }

    pub fn to_json(&self) -> Value {
        let parts: Vec<Value> = self.rows().map(|(part, bytes)| json!({ "part": part, "bytes": bytes })).collect();
        let by_part = StepPart::ALL.into_iter().zip(self.by_part).map(|(part, bytes)| (part.name().to_owned(), json!(bytes)));
        let mut line = json!({
            "kind": "memory", "memory": self.side.name(), "peak_in": self.part.name(), "parts": parts,
            "measured_peak_bytes": self.measured.map(|bytes| bytes.0), "tensor_peak_bytes_by_part": Value::Object(by_part.collect()),
        });
        self.allocator.iter().for_each(|(key, count)| line[key] = json!(count));
        line
    }
}

impl fmt::Display for MemoryProfile {
    /// The parts and their sum, which is the measured peak, and the most of each part of the step.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(&["memory at the peak", "bytes", "size", "of the whole"]);
        let whole: i64 = self.parts.iter().sum();
        let sum = if self.measured.is_some() { "measured peak" } else { "all tensors" };
        for (name, bytes) in self.rows().chain([(sum, whole)]) {
            let sign = if bytes < 0 { "-" } else { "" };
            let size = format!("{sign}{}", Bytes(bytes.unsigned_abs()));
            table.row(&[name, &bytes.to_string(), &size, &format!("{:.1} %", 100.0 * bytes as f64 / whole as f64)]);
        }
        let by_part = StepPart::ALL.into_iter().zip(self.by_part);
        let by_part: Vec<String> =
            by_part.map(|(part, bytes)| format!("{} {}", part.name(), Bytes(bytes.max(0) as u64))).collect();
        write!(f, "{table}\n\nmost tensors ({}) at a time: {}", self.side.name(), by_part.join(", "))?;
        let words = |(key, count): &(&str, i64)| match key.strip_suffix("_bytes") {
            Some(what) => format!("{} {}", what.replace('_', " "), Bytes((*count).max(0) as u64)),
            None => format!("{} {count}", key.replace('_', " ")),
        };
        match &self.allocator[..] {
            [] => Ok(()),
            said => write!(f, "\nits caching allocator: {}", said.iter().map(words).collect::<Vec<_>>().join(", ")),
        }
    }
}
