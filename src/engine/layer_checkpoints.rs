//! Layer checkpoints: hidden states at the lower border of each layer band, in a store, by column.

use std::collections::HashMap;

use tch::{Device, Tensor};

use crate::store::{Store, Waiting};
use crate::units::Fault;

/// Hidden states by (border, column).
#[derive(Debug)]
pub(super) struct LayerCheckpoints {
    store: Store,
    parked: HashMap<(usize, usize), Waiting<Tensor>>,
}

impl LayerCheckpoints {
    pub(super) fn new(store: Store) -> Self {
        Self { store, parked: HashMap::new() }
    }

    /// Parks the input of layer `border` for one column.
    pub(super) fn put(&mut self, border: usize, column: usize, hidden_bne: &Tensor) -> Result<(), Fault> {
        self.parked.insert((border, column), self.store.offload(hidden_bne)?);
        Ok(())
    }

    /// Begins to copy the hidden states to a device, where there are any.
    pub(super) fn prefetch(&mut self, border: usize, column: usize, device: Device) -> Result<(), Fault> {
        self.parked.get_mut(&(border, column)).map_or(Ok(()), |parked| parked.prefetch(device))
    }

    /// The hidden states on a device, where there are any; they still wait in the store.
    pub(super) fn fetch(&mut self, border: usize, column: usize, device: Device) -> Result<Option<Tensor>, Fault> {
        self.parked.get_mut(&(border, column)).map(|parked| parked.wait(device)).transpose()
    }

    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    /// Frees a border that is done with: its room is the next step's.
    pub(super) fn drop_border(&mut self, border: usize) {
        self.parked.retain(|(b, _), _| *b != border);
    }
}
