//! What the engine holds at a moment of a step, as it is planned.

use crate::engine::{MemoryByPart, MemoryPart, MemoryPlace};
use crate::units::Bytes;

/// What the engine holds at one point of a step. Tensors that live inside an operation, or in the graph of a cell, belong to no
/// object of the engine and are not here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldMemory {
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
    /// Attention's outputs of the forward phase that wait for their cells.
    pub attention_outputs: Bytes,
    pub replay_log: Bytes,
    /// Hidden states at the borders of layer bands; without those in a file.
    pub layer_checkpoints: Bytes,
    /// Memory of the stores of both that was used, and waits to be used again.
    pub free_room: Bytes,
    /// Memory that the stores have asked for and never touched: it is no part of what is resident.
    pub untouched: Bytes,
    /// The gradient of hidden states that goes from layer band to layer band.
    pub travelling_gradients: Bytes,
    /// What is prefetched from the host for the next cell; only where copies are asynchronous.
    pub ahead: Bytes,
    /// Gradients of what is trained: the leaves' own, and those that the head has made.
    pub parameter_gradients: Bytes,
    /// Those of layers whose weights wait on the host.
    pub waiting_gradients: Bytes,
    /// The ids of the batch.
    pub tokens: Bytes,
    /// Cells whose graphs are kept: what these take belongs to autograd.
    pub kept_cells: usize,
}

/// A part by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryEntry {
    /// The name in tables and keys.
    pub name: &'static str,
    pub place: MemoryPlace,
    pub bytes: Bytes,
}

impl HeldMemory {
    pub fn entries(&self) -> [MemoryEntry; 14] {
        let entry = |name, place, bytes| MemoryEntry { name, place, bytes };
        [
            entry("caches", MemoryPlace::Device, self.caches),
            entry("waiting caches", MemoryPlace::Host, self.waiting_caches),
            entry("gradients of caches", MemoryPlace::Device, self.cache_gradients),
            entry("undo log", MemoryPlace::Host, self.undo_log),
            entry("resident undo entries", MemoryPlace::Device, self.resident_undo),
            entry("attention outputs", MemoryPlace::Host, self.attention_outputs),
            entry("prefetched copies", MemoryPlace::Device, self.ahead),
            entry("replay log", MemoryPlace::Host, self.replay_log),
            entry("layer checkpoints", MemoryPlace::Host, self.layer_checkpoints),
            entry("free room of stores", MemoryPlace::Host, self.free_room),
            entry("travelling gradients", MemoryPlace::Host, self.travelling_gradients),
            entry("gradients of what is trained", MemoryPlace::Device, self.parameter_gradients),
            entry("waiting gradients of what is trained", MemoryPlace::Host, self.waiting_gradients),
            entry("tokens", MemoryPlace::Host, self.tokens),
        ]
    }

    /// The parts of which the engine tells, but for the free room of its stores.
    pub fn by_part(&self) -> MemoryByPart {
        let mut memory = MemoryByPart::default();
        for (part, place, bytes) in [
            (MemoryPart::KvCache, MemoryPlace::Device, self.caches),
            (MemoryPart::KvCache, MemoryPlace::Device, self.cache_gradients),
            (MemoryPart::KvCache, MemoryPlace::Host, self.waiting_caches),
            (MemoryPart::UndoLog, MemoryPlace::Device, self.resident_undo),
            (MemoryPart::UndoLog, MemoryPlace::Host, self.undo_log),
            (MemoryPart::UndoLog, MemoryPlace::Host, self.replay_log),
            (MemoryPart::LayerCheckpoints, MemoryPlace::Host, self.layer_checkpoints),
            (MemoryPart::LayerCheckpoints, MemoryPlace::Host, self.attention_outputs),
            (MemoryPart::Gradients, MemoryPlace::Device, self.parameter_gradients),
            (MemoryPart::Gradients, MemoryPlace::Host, self.waiting_gradients),
        ] {
            memory.add(part, place, bytes);
        }
        memory
    }
}
