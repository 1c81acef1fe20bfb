//! Stochastic gradient descent, with momentum (Polyak 1964) or Nesterov's, as Sutskever et al. 2013 write them.

use super::update::{MOMENTUM, Rule, Update};

pub(super) const RULE: Rule = Rule { slots: &[MOMENTUM], update, tensors: 2 };

fn update(Update { recipe, mut parameter, gradient, slots, step, learning_rate }: Update<'_>) {
    let mut change = gradient.shallow_clone();
    if let Some(buffer) = slots.first_mut() {
        // The first gradient comes in whole: the buffer begins at zero.
        let is_dampened = recipe.dampening > 0.0 && step > 1;
        let part = if is_dampened { &gradient * (1.0 - recipe.dampening) } else { gradient.shallow_clone() };
        let buffer = buffer.g_mul_scalar_(recipe.momentum).g_add_(&part);
        change = if recipe.nesterov { gradient + buffer * recipe.momentum } else { buffer };
    }
    let _ = parameter.g_sub_(&(change * learning_rate));
}
