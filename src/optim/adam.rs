//! Adam (Kingma & Ba 2015, arXiv 1412.6980) and `AdamW` (Loshchilov & Hutter 2019, arXiv 1711.05101): bias-corrected moments.

use super::rule::{Rule, Update};

/// Both, by where weight decay goes.
#[derive(Debug)]
pub(super) struct Adam {
    pub(super) betas: (f64, f64),
    pub(super) eps: f64,
    pub(super) weight_decay: f64,
    /// Weights decay by themselves (`AdamW`), not through the gradient.
    pub(super) is_decoupled: bool,
}

impl Rule for Adam {
    fn slots(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn update(&self, mut at: Update<'_>) {
        let (b1, b2) = self.betas;
        let (correction1, correction2) = (1.0 - b1.powi(at.step), 1.0 - b2.powi(at.step));
        if self.is_decoupled {
            let _ = at.parameter.g_mul_scalar_(1.0 - at.learning_rate * self.weight_decay);
        } else {
            at.decay_in_gradient(self.weight_decay);
        }
        let gradient = at.gradient.shallow_clone();
        at.mix(0, b1, &gradient);
        at.mix(1, b2, &gradient.square());
        let spread = at.slots[1].sqrt() / correction2.sqrt() + self.eps;
        let _ = at.parameter.g_sub_(&(&at.slots[0] / spread * (at.learning_rate / correction1)));
    }
}
