//! `RMSprop` (Hinton 2012, lecture 6 of "Neural Networks for Machine Learning"): gradients by the root of their mean square.

use super::rule::{Rule, Update};

#[derive(Debug)]
pub(super) struct RmsProp {
    /// Decay of the mean square.
    pub(super) smoothing: f64,
    pub(super) eps: f64,
    pub(super) weight_decay: f64,
    pub(super) momentum: f64,
}

impl Rule for RmsProp {
    fn slots(&self) -> &'static [&'static str] {
        if self.momentum > 0.0 { &["square_avg", "momentum_buffer"] } else { &["square_avg"] }
    }

    fn update(&self, mut at: Update<'_>) {
        at.decay_in_gradient(self.weight_decay);
        let gradient = at.gradient.shallow_clone();
        at.mix(0, self.smoothing, &gradient.square());
        let mut change = gradient / (at.slots[0].sqrt() + self.eps);
        if let Some(buffer) = at.slots.get_mut(1) {
            change = buffer.g_mul_scalar_(self.momentum).g_add_(&change);
        }
        let _ = at.parameter.g_sub_(&(change * at.learning_rate));
    }
}
