//! What the engine tells whoever watches: where it is, and what it holds there.

use tch::Tensor;

use crate::store::{Store, bytes_of};
use crate::units::{Bytes, named};

/// A point of a step. Columns are counted from the left, bands from the top.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A column of the forward phase begins.
    ForwardColumn { column: usize, num_columns: usize },
    /// The head's loss, and its gradient where one is wanted, begins for the hidden states of a column.
    Head { column: usize, num_columns: usize },
    /// A band's second forward begins.
    Replay { band: usize, num_bands: usize },
    /// A cell of the backward phase begins: its caches are unwound, and it is computed again with autograd, unless its graph was kept.
    Cell { band: usize, num_bands: usize, column: usize, num_columns: usize, is_kept: bool },
    /// The graph of a cell is there, and its backward begins.
    CellBackward { band: usize, num_bands: usize, column: usize, num_columns: usize },
}

pub trait Observer {
    /// Called with what whoever follows the run should know.
    fn note(&mut self, _text: &str) {}

    /// Called at each point, from the step's thread. `memory` goes through all that the engine holds there: ask only if the answer is wanted.
    fn observe(&mut self, _event: Event, _memory: &dyn Fn() -> MemoryByPart) {}

    /// Asked after [`Self::observe`] at each point: whether what is being run is given up there. Nothing of it is kept then.
    fn wants_to_stop(&self) -> bool {
        false
    }
}

#[derive(Debug)]
pub struct NoObserver;

impl Observer for NoObserver {}

named! {
    /// The parts of a step's memory. The engine tells of gradients, caches and both stores; the others are known outside of it.
    pub enum MemoryPart {
        Weights = "weights",
        OptimizerState = "optimizer state",
        /// Gradients of what is trained.
        Gradients = "gradients",
        /// Keys, values, positions and statistics of all layers, with dK and dV of the current layer band.
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
