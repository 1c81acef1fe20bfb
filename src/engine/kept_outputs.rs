//! Attention's outputs of the forward phase, which wait for the cells of the backward phase, so that these need not attend again.

use std::collections::HashMap;

use tch::{Device, Tensor};

use super::{MemoryByPart, MemoryPart, MemoryPlace};
use crate::ops::attention::Attended;
use crate::store::{Store, Waiting};
use crate::units::Fault;

/// Outputs of one layer, by the index of the chunk; of cells whose graphs are kept there are none.
#[derive(Debug)]
pub(super) struct KeptOutputs {
    store: Store,
    waiting: HashMap<usize, Waiting<Vec<Tensor>>>,
}

impl KeptOutputs {
    pub(super) fn new(store: Store) -> Self {
        Self { store, waiting: HashMap::new() }
    }

    pub(super) fn put(&mut self, index: usize, attended: &Attended) -> Result<(), Fault> {
        let tensors = vec![attended.out_bhnd.shallow_clone(), attended.lse_bhn.shallow_clone()];
        self.waiting.insert(index, Waiting::send_to(&self.store, &tensors)?);
        Ok(())
    }

    /// The output of a chunk, where it waits. A layer band's second forward leaves it; the chunk's cell needs it last.
    pub(super) fn find(&mut self, index: usize, device: Device, is_last: bool) -> Result<Option<Attended>, Fault> {
        let found = if is_last {
            self.waiting.remove(&index).map(|mut waiting| waiting.wait(device))
        } else {
            self.waiting.get(&index).map(|waiting| waiting.fetch(device))
        };
        let found = found.transpose()?.map(|tensors| {
            let mut tensors = tensors.into_iter();
            let mut next = || tensors.next().unwrap_or_default();
            Attended { out_bhnd: next(), lse_bhn: next() }
        });
        #[cfg(test)]
        if crate::units::sabotage::is_active(crate::units::sabotage::Sabotage::KeptOutputChanged) {
            return Ok(found.map(|kept| Attended { out_bhnd: kept.out_bhnd * 1.5, ..kept }));
        }
        Ok(found)
    }

    /// Sets the output of a chunk out, where it waits, on its way to the chunk's cell; its room is free from here on.
    pub(super) fn prefetch(&mut self, index: usize, device: Device) -> Result<(), Fault> {
        self.waiting.get_mut(&index).map_or(Ok(()), |waiting| waiting.leave(device))
    }

    /// Adds what waits outside the store.
    pub(super) fn measure(&self, memory: &mut MemoryByPart) {
        let waiting = self.waiting.values().map(Waiting::bytes_here).sum();
        memory.add(MemoryPart::LayerCheckpoints, MemoryPlace::Host, waiting);
    }
}
