//! What a step holds in memory, part by part: counted from the live objects, to the byte of their tensors.

use tch::Tensor;

use super::forward::ForwardTrace;
use super::layer_state::lock;
use super::{Engine, Event, Observer};
use crate::model::Model;
use crate::store::{HostTensor, Store, bytes_of};
use crate::units::Bytes;

/// What the engine holds at one point of a step. Tensors that live inside an operation, or in the graph of a cell, belong to no
/// object of the engine and are not here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryByPart {
    /// Keys, values, positions and notes of all layers, where they compute.
    pub caches: Bytes,
    /// Keys and values of offloaded caches, on the host.
    pub waiting_caches: Bytes,
    /// dK and dV of the layers of the current layer band.
    pub cache_gradients: Bytes,
    /// Entries that were overwritten, with what is needed to put them back; without those in a file.
    pub undo_log: Bytes,
    /// Those of the current cell, where it computes.
    pub resident_undo: Bytes,
    /// The choices.
    pub replay_log: Bytes,
    /// Hidden states at the borders of layer bands; without those in a file.
    pub layer_checkpoints: Bytes,
    /// Memory of the stores of both that was used, and waits to be used again.
    pub free_room: Bytes,
    /// Memory that the stores have asked for and never touched: it is no part of what is resident.
    pub untouched: Bytes,
    /// The gradient of hidden states that goes from layer band to layer band.
    pub travelling_gradients: Bytes,
    /// What is on its way from the host for the cell whose turn is next; only where copies go on beside what is computed.
    pub ahead: Bytes,
    /// Gradients of what is trained: the leaves' own, and those that the head has made.
    pub parameter_gradients: Bytes,
    /// The ids of the batch.
    pub tokens: Bytes,
}

/// Where a part lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryPlace {
    /// Where the model computes.
    Device,
    /// In the memory of the host, which may be the same.
    Host,
}

/// A part by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryEntry {
    /// The name in tables and keys.
    pub name: &'static str,
    /// Where it lies.
    pub place: MemoryPlace,
    /// What it takes.
    pub bytes: Bytes,
}

impl MemoryByPart {
    /// All parts.
    pub fn entries(&self) -> [MemoryEntry; 12] {
        let entry = |name, place, bytes| MemoryEntry { name, place, bytes };
        [
            entry("caches", MemoryPlace::Device, self.caches),
            entry("waiting caches", MemoryPlace::Host, self.waiting_caches),
            entry("gradients of caches", MemoryPlace::Device, self.cache_gradients),
            entry("undo log", MemoryPlace::Host, self.undo_log),
            entry("resident undo entries", MemoryPlace::Device, self.resident_undo),
            entry("prefetched copies", MemoryPlace::Device, self.ahead),
            entry("replay log", MemoryPlace::Host, self.replay_log),
            entry("layer checkpoints", MemoryPlace::Host, self.layer_checkpoints),
            entry("free room of stores", MemoryPlace::Host, self.free_room),
            entry("travelling gradients", MemoryPlace::Host, self.travelling_gradients),
            entry("gradients of what is trained", MemoryPlace::Device, self.parameter_gradients),
            entry("tokens", MemoryPlace::Host, self.tokens),
        ]
    }

    /// What waits in a store's memory; the rest of that memory is added.
    fn take_in(&mut self, store: &Store) -> Bytes {
        let taken = store.bytes();
        // In a file nothing waits in memory.
        let in_use = taken.in_use.min(taken.touched);
        self.free_room += Bytes(taken.touched.0 - in_use.0);
        self.untouched += Bytes(taken.memory.0 - taken.touched.0);
        in_use
    }

    fn of(model: &Model, trace: &ForwardTrace, transient: &Transient<'_>) -> Self {
        let mut memory = Self {
            replay_log: trace.log.bytes(),
            travelling_gradients: transient.travelling.iter().flatten().map(HostTensor::bytes).sum(),
            ahead: transient.ahead,
            parameter_gradients: bytes_of(transient.head.iter().chain(&gradients_of(model))),
            tokens: bytes_of([trace.tokens.all()]),
            ..Self::default()
        };
        trace.session.layers.iter().for_each(|state| lock(state).measure(&mut memory));
        let checkpoints = memory.take_in(trace.checkpoints.store());
        let undo_log = trace.session.layers.first().map(|state| memory.take_in(lock(state).store()));
        memory.layer_checkpoints += checkpoints;
        memory.undo_log += undo_log.unwrap_or_default();
        memory
    }
}

/// The leaves' own, which stay from step to step.
fn gradients_of(model: &Model) -> Vec<Tensor> {
    model.parameters().into_iter().map(|(_, leaf)| leaf.grad()).filter(Tensor::defined).collect()
}

impl Engine {
    /// What is held when no batch is under way: the room of the stores, and the gradients of what is trained.
    pub fn memory_at_rest(&self, model: &Model) -> MemoryByPart {
        let mut memory = MemoryByPart { parameter_gradients: bytes_of(&gradients_of(model)), ..MemoryByPart::default() };
        memory.layer_checkpoints = memory.take_in(&self.stores.layer_checkpoints);
        memory.undo_log = memory.take_in(&self.stores.undo_log);
        memory
    }
}

/// What a phase holds in addition to the trace.
pub(super) struct Transient<'a> {
    /// Gradients of hidden states, by column.
    pub(super) travelling: &'a [Option<HostTensor>],
    /// What of hidden states and their gradients is on its way for the next cell.
    pub(super) ahead: Bytes,
    /// Gradients of the head's parameters.
    pub(super) head: &'a [Tensor],
}

/// Tells the observer where the step is, and lets it ask what is held there.
pub(super) fn emit(
    observer: &mut dyn Observer,
    event: Event,
    (model, trace): (&Model, &ForwardTrace),
    transient: &Transient<'_>,
) {
    observer.observe(event);
    observer.measure(event, &|| MemoryByPart::of(model, trace, transient));
}
