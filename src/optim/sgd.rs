//! Stochastic gradient descent, with momentum (Polyak 1964) or Nesterov's, as Sutskever et al. 2013 write them.

use super::rule::{Rule, Update};

#[derive(Debug)]
pub(super) struct Sgd {
    pub(super) weight_decay: f64,
    pub(super) momentum: f64,
    pub(super) dampening: f64,
    pub(super) is_nesterov: bool,
}

impl Rule for Sgd {
    fn slots(&self) -> &'static [&'static str] {
        if self.momentum > 0.0 { &["momentum_buffer"] } else { &[] }
    }

    fn update(&self, mut at: Update<'_>) {
        at.decay_in_gradient(self.weight_decay);
        let mut change = at.gradient.shallow_clone();
        if let Some(buffer) = at.slots.first_mut() {
            // The first gradient comes in whole: the buffer begins at zero.
            let is_dampened = self.dampening > 0.0 && at.step > 1;
            let part = if is_dampened { &at.gradient * (1.0 - self.dampening) } else { at.gradient.shallow_clone() };
            let buffer = buffer.g_mul_scalar_(self.momentum).g_add_(&part);
            change = if self.is_nesterov { &at.gradient + buffer * self.momentum } else { buffer };
        }
        let _ = at.parameter.g_sub_(&(change * at.learning_rate));
    }
}
