//! The parts of a step's memory.

use tch::Tensor;

use crate::store::{Store, bytes_of};
use crate::units::{Bytes, named};

named! {
    /// The parts of a step's memory. The engine tells of gradients, caches and both stores; the others are known outside of it.
    pub enum MemoryPart {
        Weights = "weights",
        OptimizerState = "optimizer state",
        /// Gradients of what is trained.
        Gradients = "gradients",
        /// Keys, values, positions and notes of all layers, with dK and dV of the current layer band.
        KvCache = "KV cache",
        /// Overwritten entries, where they wait and in the current cell, and the choices.
        UndoLog = "undo log",
        /// Hidden states at the borders of layer bands, and attention outputs that wait for their cells.
        LayerCheckpoints = "layer checkpoints",
        /// Graphs of cells, hidden states and their gradients on their way, and temporary tensors.
        Activations = "activations",
        /// All that is not a tensor: the program, its libraries, and what allocators keep.
        Process = "process",
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryPlace {
    /// The memory where the model computes.
    Device,
    Host,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryByPart {
    bytes: [[Bytes; 2]; MemoryPart::ALL.len()],
    /// Memory that stores have asked for and never touched: it is no part of what is resident.
    pub untouched: Bytes,
}

impl MemoryByPart {
    pub fn add(&mut self, part: MemoryPart, place: MemoryPlace, bytes: Bytes) {
        self.bytes[part as usize][place as usize] += bytes;
    }

    pub fn get(&self, part: MemoryPart, place: MemoryPlace) -> Bytes {
        self.bytes[part as usize][place as usize]
    }

    /// Adds the memory of a store, used or free to be used again.
    pub(super) fn add_store(&mut self, part: MemoryPart, store: &Store) {
        let taken = store.bytes();
        self.add(part, MemoryPlace::Host, taken.touched);
        self.untouched += Bytes(taken.memory.0 - taken.touched.0);
    }

    pub(super) fn add_gradients<'a>(&mut self, gradients: impl IntoIterator<Item = &'a Tensor>) {
        self.add(MemoryPart::Gradients, MemoryPlace::Device, bytes_of(gradients));
    }
}
