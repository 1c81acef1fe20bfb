//! Adamax (Kingma & Ba 2015, arXiv 1412.6980, section 7.1): Adam with the largest gradient, forgotten slowly, in place of the mean square.

use super::rule::{Rule, Update};

#[derive(Debug)]
pub(super) struct Adamax {
    pub(super) betas: (f64, f64),
    pub(super) eps: f64,
    pub(super) weight_decay: f64,
}

impl Rule for Adamax {
    fn slots(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_inf"]
    }

    fn update(&self, mut at: Update<'_>) {
        let (b1, b2) = self.betas;
        at.decay_in_gradient(self.weight_decay);
        let gradient = at.gradient.shallow_clone();
        at.mix(0, b1, &gradient);
        let largest = (&at.slots[1] * b2).maximum(&(gradient.abs() + self.eps));
        at.slots[1].copy_(&largest);
        let rate = at.learning_rate / (1.0 - b1.powi(at.step));
        let _ = at.parameter.g_sub_(&(&at.slots[0] / largest * rate));
    }
}
