//! Attention's outputs of the forward phase, which wait for the cells of the backward phase, so that these need not attend again.

use std::collections::HashMap;

use tch::Device;

use super::{MemoryByPart, MemoryPart, MemoryPlace};
use crate::ops::attention::Attended;
use crate::store::{HostTensor, Store, TensorPrefetch};

/// Those of one layer, by chunk; of cells whose graphs are kept there are none.
#[derive(Debug)]
pub(super) struct KeptOutputs {
    store: Store,
    waiting: HashMap<usize, [HostTensor; 2]>,
    /// Prefetched for the next cell.
    ahead: HashMap<usize, [TensorPrefetch; 2]>,
}

impl KeptOutputs {
    pub(super) fn new(store: Store) -> Self {
        Self { store, waiting: HashMap::new(), ahead: HashMap::new() }
    }

    /// Where they wait, unless they stay where they are.
    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    /// Lets the output of a chunk wait.
    pub(super) fn put(&mut self, chunk: usize, attended: &Attended) {
        let waiting = [&attended.out_bhnd, &attended.lse_bhn].map(|x| HostTensor::send_to(&self.store, x));
        self.waiting.insert(chunk, waiting);
    }

    /// The output of a chunk, where it waits. A layer band's second forward leaves it; the chunk's cell needs it last.
    pub(super) fn find(&mut self, chunk: usize, device: Device, is_last: bool) -> Option<Attended> {
        let coming = if is_last {
            self.prefetch(chunk, device);
            self.ahead.remove(&chunk)?
        } else {
            self.waiting.get(&chunk)?.each_ref().map(|x| x.prefetch(device))
        };
        let [out_bhnd, lse_bhn] = coming.map(TensorPrefetch::wait);
        #[cfg(test)]
        let out_bhnd =
            if crate::sabotage::is_active(crate::sabotage::Sabotage::KeptOutputChanged) { out_bhnd * 1.5 } else { out_bhnd };
        Some(Attended { out_bhnd, lse_bhn })
    }

    /// Sets the output of a chunk out, where it waits, on its way to the chunk's cell; its room is free from here on.
    pub(super) fn prefetch(&mut self, chunk: usize, device: Device) {
        if let Some(waiting) = self.waiting.remove(&chunk) {
            self.ahead.insert(chunk, waiting.map(|x| x.prefetch(device)));
        }
    }

    /// Adds what waits outside the store.
    pub(super) fn measure(&self, memory: &mut MemoryByPart) {
        let waiting = self.waiting.values().flatten().map(HostTensor::bytes_here).sum();
        memory.add(MemoryPart::LayerCheckpoints, MemoryPlace::Host, waiting);
    }
}
