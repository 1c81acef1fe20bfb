//! The peak of a step's memory before it is made, part by part.

use super::StepSpec;
use super::part::StepPart;
use super::rates::Rates;
use super::walk::{Span, StepWalk, Walked};
use crate::data::{Batch, IGNORE, Targets};
use crate::engine::{ChunkPlan, MemoryPlace};
use crate::recipe::{StoreForm, StorePlace};
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
    /// What the graphs of all cells keep, one after the other.
    kept: u64,
    /// What goes into the stores: layer checkpoints and undo log.
    parked: [u64; 2],
}

impl Forecast {
    /// Of a step on `batch`, which is planned as `plan`, after the first: stores keep the room that they have had.
    pub fn of(spec: &StepSpec<'_>, plan: &ChunkPlan, batch: &Batch) -> Self {
        let targets = targets_by_column(plan, batch);
        let mut walk = Collected::new(spec);
        let Walked { files, parked } = StepWalk::new(spec, plan, &targets).each(&mut |moment| walk.take(&moment));
        Self { device: walk.device.peak, host: walk.host.map(|host| host.peak), files, kept: walk.kept, parked }
    }

    /// The spans of such a step, in their order: one for each event of the engine, and two for what comes after it.
    pub fn moments(spec: &StepSpec<'_>, plan: &ChunkPlan, batch: &Batch) -> Vec<Span> {
        let targets = targets_by_column(plan, batch);
        let mut moments = Vec::new();
        StepWalk::new(spec, plan, &targets).each(&mut |moment| moments.push(moment));
        moments
    }

    /// Seconds by part, in the order of [`StepPart::ALL`].
    pub(super) fn seconds(&self, rates: &Rates, spec: &StepSpec<'_>, plan: &ChunkPlan, batch: &Batch) -> [f64; 6] {
        let mut seconds = rates.seconds(spec, plan, (batch.num_tokens(), batch.num_targets()), self.kept as f64);
        let stores = spec.settings.stores();
        for (store, bytes) in [stores.0, stores.1].into_iter().zip(self.parked) {
            let rounds = store.form != StoreForm::Plain;
            // In on the way up, out on the way back.
            let half = 0.5 * rates.of_store(bytes as f64, rounds, store.place == StorePlace::File);
            seconds[StepPart::Forward as usize] += half;
            seconds[StepPart::Recompute as usize] += half;
        }
        seconds
    }
}

/// The highest moments so far.
struct Collected {
    /// What there is at every moment where the model computes.
    standing: [(&'static str, Bytes); 4],
    device: Highest,
    host: Option<Highest>,
    kept: u64,
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
        let standing = [
            ("weights", spec.weights()),
            ("adapter", spec.adapter()),
            ("optimizer state", spec.optimizer()),
            ("accumulated gradients", accumulated),
        ];
        Self { standing, device: Highest::none(), host: spec.device.is_cuda().then(Highest::none), kept: 0 }
    }

    fn take(&mut self, moment: &Span) {
        if moment.part == StepPart::Backward {
            self.kept += moment.graph;
        }
        let (held, is_alone) = (moment.held.entries(), self.host.is_none());
        let at = |place: MemoryPlace| {
            held.iter()
                .filter(move |sequence| is_alone || sequence.place == place)
                .map(|sequence| (sequence.name, sequence.bytes))
        };
        let of_moment = [("graph of the cell", Bytes(moment.graph)), ("inside", Bytes(moment.inside))];
        self.device.raise(moment.part, self.standing.into_iter().chain(at(MemoryPlace::Device)).chain(of_moment));
        if let Some(host) = &mut self.host {
            host.raise(moment.part, at(MemoryPlace::Host));
        }
    }
}

/// Places with a target, by column.
fn targets_by_column(plan: &ChunkPlan, batch: &Batch) -> Vec<usize> {
    let ends: Vec<usize> = plan.columns.iter().map(|column| plan.tokens(column)).map(|(start, len)| start + len).collect();
    let mut targets = vec![0; ends.len()];
    let mut count = |position: usize| {
        if let Some(of_column) = targets.get_mut(ends.partition_point(|&end| end <= position)) {
            *of_column += 1;
        }
    };
    for sequence in &batch.sequences {
        match &sequence.targets {
            Targets::NextToken(labels) => {
                labels.iter().enumerate().filter(|(_, label)| **label != IGNORE).for_each(|(position, _)| count(position));
            }
            Targets::Class(_) => count(sequence.inputs.len().saturating_sub(1)),
        }
    }
    targets
}
