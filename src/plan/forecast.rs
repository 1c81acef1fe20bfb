//! The peak of a step's memory before it is made, part by part.

use super::Subject;
use super::part::Part;
use super::rates::Rates;
use super::walk::{Moment, Walk, Walked};
use crate::data::{Batch, IGNORE, Targets};
use crate::engine::{ChunkPlan, Place};
use crate::recipe::{StoreForm, StorePlace};
use crate::units::Bytes;

/// One memory at its peak.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peak {
    /// The part of the step in which it is.
    pub part: Part,
    /// Parts by name; their sum is the peak.
    pub rows: Vec<(&'static str, Bytes)>,
}

impl Peak {
    /// The sum of the parts.
    pub fn bytes(&self) -> Bytes {
        self.rows.iter().map(|(_, bytes)| *bytes).sum()
    }
}

/// What a step would take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forecast {
    /// Of the memory where the model computes: of the process' tensors, on a CPU.
    pub device: Peak,
    /// Of the host's memory, where the model computes elsewhere.
    pub host: Option<Peak>,
    /// What waits in files at most.
    pub files: Bytes,
    /// What the graphs of all cells keep, one after the other.
    kept: u64,
    /// What goes into the stores: layer checkpoints and undo log.
    parked: [u64; 2],
}

impl Forecast {
    /// Of a step on `batch`, which is planned as `plan`, after the first: stores keep the room that they have had.
    pub fn of(subject: &Subject<'_>, plan: &ChunkPlan, batch: &Batch) -> Self {
        let targets = targets_by_column(plan, batch);
        let mut walk = Collected::new(subject);
        let Walked { files, parked } = Walk::new(subject, plan, &targets).each(&mut |moment| walk.take(&moment));
        Self { device: walk.device.peak, host: walk.host.map(|host| host.peak), files, kept: walk.kept, parked }
    }

    /// The spans of such a step, in their order: one for each event of the engine, and two for what comes after it.
    pub fn moments(subject: &Subject<'_>, plan: &ChunkPlan, batch: &Batch) -> Vec<Moment> {
        let targets = targets_by_column(plan, batch);
        let mut moments = Vec::new();
        Walk::new(subject, plan, &targets).each(&mut |moment| moments.push(moment));
        moments
    }

    /// Seconds by part, in the order of [`Part::ALL`].
    pub(super) fn seconds(&self, rates: &Rates, subject: &Subject<'_>, plan: &ChunkPlan, batch: &Batch) -> [f64; 6] {
        let mut seconds = rates.seconds(subject, plan, (batch.num_tokens(), batch.num_targets()), self.kept as f64);
        let stores = subject.settings.stores();
        for (store, bytes) in [stores.0, stores.1].into_iter().zip(self.parked) {
            let rounds = store.form != StoreForm::Plain;
            // In on the way up, out on the way back.
            let half = 0.5 * rates.of_store(bytes as f64, rounds, store.place == StorePlace::File);
            seconds[Part::Forward as usize] += half;
            seconds[Part::Recompute as usize] += half;
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
    peak: Peak,
    bytes: u64,
}

impl Highest {
    fn none() -> Self {
        Self { peak: Peak { part: Part::Forward, rows: Vec::new() }, bytes: 0 }
    }

    /// Most moments are none: their parts are added up, and listed only if they are.
    fn raise(&mut self, part: Part, rows: impl Iterator<Item = (&'static str, Bytes)> + Clone) {
        let bytes = rows.clone().map(|(_, bytes)| bytes.0).sum();
        if bytes > self.bytes {
            *self = Self { peak: Peak { part, rows: rows.collect() }, bytes };
        }
    }
}

impl Collected {
    fn new(subject: &Subject<'_>) -> Self {
        let accumulated = if subject.accumulates { subject.trained_bytes() } else { Bytes(0) };
        let standing = [
            ("weights", subject.weights()),
            ("adapter", subject.adapter()),
            ("optimizer state", subject.optimizer()),
            ("accumulated gradients", accumulated),
        ];
        Self { standing, device: Highest::none(), host: subject.device.is_cuda().then(Highest::none), kept: 0 }
    }

    fn take(&mut self, moment: &Moment) {
        if moment.part == Part::Backward {
            self.kept += moment.graph;
        }
        let (held, is_alone) = (moment.held.rows(), self.host.is_none());
        let at = |place: Place| held.iter().filter(move |row| is_alone || row.place == place).map(|row| (row.name, row.bytes));
        let of_moment = [("graph of the cell", Bytes(moment.graph)), ("inside", Bytes(moment.inside))];
        self.device.raise(moment.part, self.standing.into_iter().chain(at(Place::Device)).chain(of_moment));
        if let Some(host) = &mut self.host {
            host.raise(moment.part, at(Place::Host));
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
    for row in &batch.rows {
        match &row.targets {
            Targets::NextToken(labels) => {
                labels.iter().enumerate().filter(|(_, label)| **label != IGNORE).for_each(|(position, _)| count(position));
            }
            Targets::Class(_) => count(row.inputs.len().saturating_sub(1)),
        }
    }
    targets
}
