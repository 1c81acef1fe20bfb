//! The peak of a step's memory before it is made, part by part.

use std::ops::Range;

use super::StepSpec;
use super::held::MemoryEntry;
use super::part::StepPart;
use super::walk::{Span, StepWalk};
use crate::data::{Batch, IGNORE, Sequence, Targets};
use crate::engine::{ChunkPlan, MemoryPlace};
use crate::recipe::Offload;
use crate::units::Bytes;

/// One memory at its peak.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedPeak {
    /// The part of the step in which it is.
    pub part: StepPart,
    /// Parts by name; their sum is the peak.
    pub parts: Vec<(&'static str, Bytes)>,
}

impl PlannedPeak {
    /// The sum of the parts.
    pub fn bytes(&self) -> Bytes {
        self.parts.iter().map(|(_, bytes)| *bytes).sum()
    }
}

/// What a step would take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forecast {
    /// Of the memory where the model computes: of the process' tensors, on a CPU.
    pub device: PlannedPeak,
    /// Of the host's memory, where the model computes elsewhere.
    pub host: Option<PlannedPeak>,
    /// What waits in files at most.
    pub files: Bytes,
}

impl Forecast {
    /// Of a step on `batch`, which is planned as `plan`, after the first: stores keep the room that they have had.
    pub fn of(spec: &StepSpec<'_>, plan: &ChunkPlan, batch: &Batch) -> Self {
        let targets = targets_by_column(plan, batch);
        let mut walk = Collected::new(spec);
        let files = StepWalk::new(spec, plan, &targets).each(&mut |moment| walk.take(&moment));
        Self { device: walk.device.peak, host: walk.host.map(|host| host.peak), files }
    }

    /// The spans of such a step, in their order: one for each event of the engine, and two for what comes after it.
    pub fn moments(spec: &StepSpec<'_>, plan: &ChunkPlan, batch: &Batch) -> Vec<Span> {
        let targets = targets_by_column(plan, batch);
        let mut moments = Vec::new();
        StepWalk::new(spec, plan, &targets).each(&mut |moment| moments.push(moment));
        moments
    }
}

/// The highest moments so far.
struct Collected {
    /// What there is at every moment.
    standing: [MemoryEntry; 5],
    device: Highest,
    host: Option<Highest>,
}

/// The highest moment of one memory.
struct Highest {
    peak: PlannedPeak,
    bytes: u64,
}

impl Highest {
    fn none() -> Self {
        Self { peak: PlannedPeak { part: StepPart::Forward, parts: Vec::new() }, bytes: 0 }
    }

    /// Most moments are none: their parts are added up, and listed only if they are.
    fn raise(&mut self, part: StepPart, parts: impl Iterator<Item = (&'static str, Bytes)> + Clone) {
        let bytes = parts.clone().map(|(_, bytes)| bytes.0).sum();
        if bytes > self.bytes {
            *self = Self { peak: PlannedPeak { part, parts: parts.collect() }, bytes };
        }
    }
}

impl Collected {
    fn new(spec: &StepSpec<'_>) -> Self {
        let accumulated = if spec.accumulates { spec.trained_bytes() } else { Bytes(0) };
        let entry = |name, place, bytes| MemoryEntry { name, place, bytes };
        let [weights, waiting] = spec.weights();
        let of_gradients = if spec.sums_apart() && spec.layers_wait() { MemoryPlace::Host } else { MemoryPlace::Device };
        let of_optimizer = if spec.offload == Offload::None { MemoryPlace::Device } else { MemoryPlace::Host };
        let standing = [
            entry("weights", MemoryPlace::Device, weights),
            entry("waiting weights", MemoryPlace::Host, waiting),
            entry("adapter", MemoryPlace::Device, spec.adapter()),
            entry("optimizer state", of_optimizer, spec.optimizer_state()),
            entry("accumulated gradients", of_gradients, accumulated),
        ];
        Self { standing, device: Highest::none(), host: spec.device.is_cuda().then(Highest::none) }
    }

    fn take(&mut self, moment: &Span) {
        let (held, standing, is_alone) = (moment.held.entries(), self.standing, self.host.is_none());
        let at = |place: MemoryPlace| {
            let all = standing.iter().chain(&held);
            all.filter(move |entry| is_alone || entry.place == place).map(|entry| (entry.name, entry.bytes))
        };
        let of_moment = [("graph of the cell", Bytes(moment.graph)), ("inside", Bytes(moment.inside))];
        self.device.raise(moment.part, at(MemoryPlace::Device).chain(of_moment));
        if let Some(host) = &mut self.host {
            host.raise(moment.part, at(MemoryPlace::Host));
        }
    }
}

/// Positions with a target, by column.
fn targets_by_column(plan: &ChunkPlan, batch: &Batch) -> Vec<usize> {
    let of_column = |column: &Range<usize>| {
        let (start, len) = plan.tokens(column);
        let of_sequence = |sequence: &Sequence| match &sequence.targets {
            Targets::NextToken(labels) => {
                let labels = labels.get(start..labels.len().min(start + len)).unwrap_or_default();
                labels.iter().filter(|label| **label != IGNORE).count()
            }
            Targets::Class(_) => usize::from((start..start + len).contains(&sequence.inputs.len().saturating_sub(1))),
        };
        batch.sequences.iter().map(of_sequence).sum()
    };
    plan.columns.iter().map(of_column).collect()
}
