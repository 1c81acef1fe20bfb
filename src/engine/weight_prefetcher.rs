//! Which layers' weights come next, where a model's layers wait on the host: those of the band that follows.

use std::ops::Range;

use super::Settings;
use crate::model::Model;

/// Layer bands in the order of a pass.
#[derive(Clone, Debug)]
pub(super) struct WeightPrefetcher {
    bands: Vec<Range<usize>>,
    order: PassOrder,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PassOrder {
    /// The band above, and after the top the lowest, for another column.
    Up,
    /// The band above, and after the top the one below it: the backward phase follows.
    UpAndBack,
    Down,
}

impl WeightPrefetcher {
    pub(super) fn new(settings: &Settings, order: PassOrder) -> Self {
        Self { bands: settings.layer_bands(), order }
    }

    /// A layer is about to run.
    pub(super) fn enter(&self, model: &Model, layer: usize) {
        if !model.has_waiting_layers() {
            return;
        }
        let Some(at) = self.bands.iter().position(|band| band.contains(&layer)) else { return };
        let is_top = at + 1 == self.bands.len();
        let next = match self.order {
            PassOrder::Up if is_top => Some(0),
            PassOrder::Up | PassOrder::UpAndBack if !is_top => Some(at + 1),
            _ => at.checked_sub(1),
        };
        model.bring_layers(self.bands[at].clone(), next.map(|next| self.bands[next].clone()));
    }
}
