//! Statistics that a policy keeps of the entries: features from their writing, and what it made of the attention since. Both lie by slot
//! and move with their entries; they serve the choices alone, so that the way back needs none of them.

use tch::{Kind, Tensor};

use super::buffer::{slots_of, write_slots};

#[derive(Debug, Default)]
pub(super) struct EntryStats {
    /// What the policy has observed of each entry `(B, G, slots)`, f32.
    observed: Option<Tensor>,
    /// Features of each entry `(B, G, slots, F)`, f32.
    features: Option<Tensor>,
}

impl EntryStats {
    pub(super) fn all(&self) -> impl Iterator<Item = &Tensor> {
        self.observed.iter().chain(&self.features)
    }

    pub(super) fn clear(&self, start: i64, len: i64) {
        self.all().for_each(|stats| drop(stats.narrow(2, start, len).zero_()));
    }

    pub(super) fn reserve(&mut self, slots: i64) {
        for stats in self.observed.iter_mut().chain(&mut self.features) {
            let mut size = stats.size();
            let old = std::mem::replace(&mut size[2], slots);
            let larger = Tensor::zeros(&size[..], (stats.kind(), stats.device()));
            larger.narrow(2, 0, old).copy_(stats);
            *stats = larger;
        }
    }

    /// What was observed of the first slots of the first sequences `(B, G, filled)`.
    pub(super) fn observed(&self, sequences: i64, filled: i64) -> Option<Tensor> {
        self.observed.as_ref().map(|stats| slots_of(stats, sequences, 0, filled))
    }

    /// The features of the first slots of the first sequences `(B, G, filled, F)`.
    pub(super) fn features(&self, sequences: i64, filled: i64) -> Option<Tensor> {
        self.features.as_ref().map(|stats| slots_of(stats, sequences, 0, filled))
    }

    /// Replaces what was observed in a cache of a `size` `[B, G, slots]`, whose B may be larger.
    pub(super) fn set_observed(&mut self, size: &[i64], observed_bgc: &Tensor) {
        let empty = || Tensor::zeros(size, (Kind::Float, observed_bgc.device()));
        write_slots(self.observed.get_or_insert_with(empty), 0, observed_bgc);
    }

    /// Writes down the features of a region, `(B, G, n)` each; `size` is that of the cache, as above.
    pub(super) fn set_features(&mut self, size: &[i64], start: i64, features: &[Tensor]) {
        let Some(first) = features.first() else { return };
        let empty = || Tensor::zeros([size, &[features.len() as i64]].concat(), (Kind::Float, first.device()));
        let together = if let [only] = features { only.unsqueeze(-1) } else { Tensor::stack(features, -1) };
        write_slots(self.features.get_or_insert_with(empty), start, &together);
    }
}
