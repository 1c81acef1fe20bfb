//! Which layers' weights come next, where a model's layers wait on the host: those of the band that follows.

use super::Settings;
use crate::model::Model;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PassOrder {
    /// The band above, and after the top the lowest, for another column.
    Up,
    /// The band above, and after the top the one below it: the backward phase follows.
    UpAndBack,
    Down,
}

impl PassOrder {
    /// A layer is about to run: its band's weights are brought, and those of the next set out.
    pub(super) fn enter(self, settings: &Settings, model: &Model, layer: usize) {
        if !model.has_waiting_layers() {
            return;
        }
        let first_trained = model.first_trained_layer();
        let bands = settings.layer_bands(first_trained);
        let Some(at) = bands.iter().position(|band| band.contains(&layer)) else { return };
        let is_top = at + 1 == bands.len();
        let next = match self {
            Self::Up if is_top => Some(0),
            Self::Up | Self::UpAndBack if !is_top => Some(at + 1),
            // The backward phase ends at the lowest trained layer.
            _ => at.checked_sub(1).filter(|below| bands[*below].start >= first_trained),
        };
        model.bring_layers(bands[at].clone(), next.map(|next| bands[next].clone()));
    }
}
