//! Adadelta (Zeiler 2012, arXiv 1212.5701): steps as long as the mean of the last ones.

use super::rule::{Rule, Update};

#[derive(Debug)]
pub(super) struct Adadelta {
    /// Decay of both means of squares.
    pub(super) smoothing: f64,
    pub(super) eps: f64,
    pub(super) weight_decay: f64,
}

impl Rule for Adadelta {
    fn slots(&self) -> &'static [&'static str] {
        &["square_avg", "acc_delta"]
    }

    fn update(&self, mut at: Update<'_>) {
        at.decay_in_gradient(self.weight_decay);
        let gradient = at.gradient.shallow_clone();
        at.mix(0, self.smoothing, &gradient.square());
        let delta = (&at.slots[1] + self.eps).sqrt() / (&at.slots[0] + self.eps).sqrt() * gradient;
        at.mix(1, self.smoothing, &delta.square());
        let _ = at.parameter.g_sub_(&(delta * at.learning_rate));
    }
}
