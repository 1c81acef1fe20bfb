//! The parts of a step, by which its time and its memory are told, and what it holds at one moment.

use super::StepSpec;
use crate::engine::{Event, MemoryPlace};
use crate::recipe::Offload;
use crate::units::{Bytes, named};

named! {
    /// In the order in which they come.
    pub enum StepPart {
        /// The forward phase, but for the head.
        Forward = "forward",
        /// The loss and its gradient: in the forward phase, or in the cells where all trained layers are one band.
        Head = "head",
        /// The second forward of layer bands below the top one.
        Replay = "replay",
        /// Unwinding cells to their left border and computing them again with autograd.
        Recompute = "recompute",
        Backward = "backward",
        Optimizer = "optimizer",
    }
}

impl From<Event> for StepPart {
    fn from(event: Event) -> Self {
        match event {
            Event::ForwardColumn { .. } => Self::Forward,
            Event::Head { .. } => Self::Head,
            Event::Replay { .. } => Self::Replay,
            Event::Cell { is_kept: false, .. } => Self::Recompute,
            Event::Cell { is_kept: true, .. } | Event::CellBackward { .. } => Self::Backward,
        }
    }
}

/// One memory at its peak.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedPeak {
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

/// What is held at one moment.
#[derive(Clone, Debug)]
pub(super) struct Moment {
    part: StepPart,
    /// Parts by name, where they are held, and bytes.
    pub(super) entries: Vec<(&'static str, MemoryPlace, u64)>,
}

impl Moment {
    /// With what is there in every moment: weights, and what is kept of what is trained.
    pub(super) fn new(spec: &StepSpec<'_>, part: StepPart) -> Self {
        let mut moment = Self { part, entries: Vec::new() };
        let place = |is_on_host: bool| if is_on_host { MemoryPlace::Host } else { MemoryPlace::Device };
        let [weights, waiting] = spec.weights();
        moment.add("weights", MemoryPlace::Device, weights.0);
        moment.add("waiting weights", MemoryPlace::Host, waiting.0);
        moment.add("unpacked weight", MemoryPlace::Device, spec.unpacked());
        moment.add("adapter", MemoryPlace::Device, spec.adapter().0);
        moment.add("optimizer state", place(spec.recipe.train.offload != Offload::None), spec.optimizer_state().0);
        if spec.recipe.train.gradient_accumulation_steps > 1 {
            let waits = spec.sums_apart() && spec.layers_wait();
            moment.add("accumulated gradients", place(waits), spec.trained_bytes().0);
        }
        moment.add("gradients of what is trained", MemoryPlace::Device, spec.lasting_gradients());
        moment
    }

    /// Adds to a part, if it is something.
    pub(super) fn add(&mut self, name: &'static str, place: MemoryPlace, bytes: u64) {
        match self.entries.iter_mut().find(|entry| (entry.0, entry.1) == (name, place)) {
            Some(entry) => entry.2 += bytes,
            None if bytes > 0 => self.entries.push((name, place, bytes)),
            None => {}
        }
    }

    /// The parts in one memory, or in all.
    pub(super) fn peak(&self, place: Option<MemoryPlace>) -> PlannedPeak {
        let held = self.entries.iter().filter(|entry| place.is_none_or(|place| entry.1 == place));
        PlannedPeak { part: self.part, parts: held.map(|&(name, _, bytes)| (name, Bytes(bytes))).collect() }
    }
}
