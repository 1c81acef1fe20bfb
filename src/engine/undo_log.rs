//! One layer's undo log during a step: entries that wait in a store, and those of the current cell, which stay where they are.

use std::collections::HashMap;

use tch::{Device, Tensor};

use super::{MemoryByPart, MemoryPart, MemoryPlace};
use crate::cache::Undo;
use crate::store::{Store, Waiting};
use crate::units::Fault;

#[derive(Debug)]
pub(super) struct UndoLog {
    pub(super) store: Store,
    /// What of an entry is no tensor, and its tensors, which wait, by the index of the chunk.
    waiting: HashMap<usize, (Undo, Waiting<Vec<Tensor>>)>,
    /// Undo entries of the current cell's chunks, from its recomputation to its backward.
    resident: HashMap<usize, Undo>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeepUndo {
    Nothing,
    /// It waits in the store.
    Parked,
    /// It stays where it is, for the backward of the same cell.
    Resident,
}

impl UndoLog {
    pub(super) fn new(store: Store) -> Self {
        Self { store, waiting: HashMap::new(), resident: HashMap::new() }
    }

    pub(super) fn put(&mut self, index: usize, undo: Undo, keep: KeepUndo) -> Result<(), Fault> {
        match keep {
            KeepUndo::Nothing => {}
            KeepUndo::Parked => {
                let (bare, tensors) = undo.take_apart();
                self.waiting.insert(index, (bare, self.store.offload(&tensors)?));
            }
            // A cell that was unwound overwrites the same entries again: nothing has to be fetched a second time.
            KeepUndo::Resident => drop(self.resident.insert(index, undo)),
        }
        Ok(())
    }

    /// Begins to copy the entry of a chunk to the device; `None` where there is none.
    pub(super) fn prefetch(&mut self, index: usize, device: Device) -> Option<Result<(), Fault>> {
        Some(self.waiting.get_mut(&index)?.1.prefetch(device))
    }

    /// The entry of a chunk on the device; it still waits in the store.
    pub(super) fn fetch(&mut self, index: usize, device: Device) -> Option<Result<Undo, Fault>> {
        let (bare, waiting) = self.waiting.get_mut(&index)?;
        Some(waiting.wait(device).map(|tensors| bare.put_together(tensors)))
    }

    /// Takes the entry out that a chunk's backward needs, which is the last to need it.
    pub(super) fn take(&mut self, index: usize) -> Option<Undo> {
        self.waiting.remove(&index);
        self.resident.remove(&index)
    }

    /// Adds what is at hand.
    pub(super) fn measure(&self, memory: &mut MemoryByPart) {
        let resident = self.resident.values().map(Undo::bytes).sum();
        memory.add(MemoryPart::UndoLog, MemoryPlace::Device, resident);
    }
}
