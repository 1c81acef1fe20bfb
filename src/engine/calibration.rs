//! What the backward phase of any number of batches says of a model's cache: gates, and slots for each layer.

use super::importance::{FittedGate, LayerImportance, MIN_DISTANCE, MIN_QUERIES, SlotDemand, share_out};
use super::layer_state::SharedLayer;
use crate::model::{LayerSpec, ModelConfig};
use crate::native::locked;
use crate::ops::query_statistics::QuerySums;

/// What is learned of the entries of all layers, over any number of batches; of none that has a sliding window, where no policy evicts.
#[derive(Debug)]
pub struct Calibration(Vec<Option<LayerImportance>>);

impl Calibration {
    /// A shorter sample tells too little: of each entry queries must tell that are some way behind it, and that of many entries.
    pub const MIN_TOKENS: usize = 2 * (MIN_DISTANCE + MIN_QUERIES);

    pub fn new(config: &ModelConfig) -> Self {
        let of_layer = |layer: &LayerSpec| {
            let attention = &layer.attention;
            attention.rule.window.is_none().then(|| LayerImportance::new(attention.pairs()))
        };
        Self(config.layers.iter().map(of_layer).collect())
    }

    /// Has the layers of a batch of so many tokens learn in its backward phase.
    pub(super) fn attach(&mut self, layers: &[SharedLayer], tokens: usize) {
        for (state, importance) in layers.iter().zip(&mut self.0) {
            if let Some(importance) = importance {
                importance.counts_from = tokens / 2;
            }
            locked(state).importance = importance.take();
        }
    }

    /// Takes what was learned out of the layers, when the batch is done or has failed.
    pub(super) fn detach(&mut self, layers: &[SharedLayer]) {
        for (state, importance) in layers.iter().zip(&mut self.0) {
            *importance = locked(state).importance.take();
            importance.iter_mut().for_each(LayerImportance::forget_entries);
        }
    }

    /// The gates that say most of the importance of an entry, bottom to top; `None` of a layer with a window, or with fewer entries than channels.
    pub fn gates(&self) -> Vec<Option<FittedGate>> {
        self.0.iter().map(|of| of.as_ref()?.gate.solve()).collect()
    }

    /// Sums over queries, bottom to top; `None` of a layer with a window.
    pub fn queries(&self) -> impl Iterator<Item = Option<&QuerySums>> {
        self.0.iter().map(|of| of.as_ref().map(|of| &of.queries))
    }

    /// Shares `mean` slots a layer out, bottom to top, in multiples of `step`, as is `least`; `None` without counts, or if the mean is below it.
    pub fn slots(&self, mean: usize, least: usize, step: usize) -> Option<Vec<usize>> {
        let demands: Vec<&SlotDemand> = self.0.iter().flatten().map(|of| &of.slots).collect();
        let mut shares = share_out(&demands, mean, least, step)?.into_iter();
        Some(self.0.iter().map(|of| of.as_ref().and_then(|_| shares.next()).unwrap_or(mean)).collect())
    }
}
