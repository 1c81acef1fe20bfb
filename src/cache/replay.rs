//! The replay log: every choice of the forward phase, to be repeated in the backward phase and walked over by the proof.

use super::{CacheError, ChunkSpan, Victims};
use crate::units::LayerIdx;

/// The choices of one layer, by the index of the chunk.
#[derive(Debug, Default)]
pub struct LayerLog {
    victims: Vec<Option<Victims>>,
}

impl LayerLog {
    /// Records what a chunk evicted; `None` where it evicted nothing.
    pub fn record(&mut self, victims: Option<Victims>) {
        self.victims.push(victims);
    }

    /// What chunk `index` evicted.
    pub fn victims(&self, index: usize) -> Option<&Victims> {
        self.victims.get(index).and_then(Option::as_ref)
    }

    /// Replaces the first victim of chunk `index` by its neighbour: a fault for tests.
    #[cfg(test)]
    pub(crate) fn shift_first_victim(&mut self, index: usize) {
        let mut slots: Vec<i64> = match &self.victims[index] {
            Some(Victims::Shared(slots)) => slots.clone(),
            Some(Victims::PerHead(slots)) => Vec::try_from(slots.reshape([-1])).unwrap(),
            None => panic!("chunk {index} evicts nothing"),
        };
        // A head's own victims come first in the flat list; its neighbour below is filled, and so is the next one up.
        let own = &slots[..self.victims[index].as_ref().map_or(0, Victims::len)];
        let free = |slot: &i64| !own.contains(slot);
        slots[0] = (0..slots[0]).rev().find(free).or_else(|| (slots[0] + 1..=slots[0] + own.len() as i64).find(free)).unwrap();
        let shifted = tch::Tensor::from_slice(&slots);
        self.victims[index] = Some(match self.victims[index].take().unwrap() {
            Victims::Shared(_) => Victims::Shared(slots),
            Victims::PerHead(old) => Victims::PerHead(shifted.view(&old.size()[..])),
        });
    }

    /// The choice for `span`, checked to have the number of evictions that the cache needs.
    pub(super) fn expect(&self, layer: LayerIdx, span: &ChunkSpan, expected: usize) -> Result<Option<&Victims>, CacheError> {
        let victims = self.victims(span.index);
        let found = victims.map_or(0, Victims::len);
        if found == expected { Ok(victims) } else { Err(CacheError::LogMismatch { layer, chunk: span.index, expected, found }) }
    }
}

/// The choices of all layers, with the chunks they belong to.
#[derive(Debug)]
pub struct ReplayLog {
    /// The chunks in the order of writing.
    pub spans: Vec<ChunkSpan>,
    /// Slots of each layer (at most the longest row's tokens).
    pub cache_lengths: Vec<usize>,
    /// Choices by layer.
    pub layers: Vec<LayerLog>,
}
