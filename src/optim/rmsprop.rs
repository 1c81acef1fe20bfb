//! `RMSprop` (Hinton 2012, lecture 6 of "Neural Networks for Machine Learning"): gradients by the root of their mean square.

use super::update::{MOMENTUM, Rule, Update, mix};

pub(super) const RULE: Rule = Rule { slots: &["square_avg", MOMENTUM], update, tensors: 2 };

fn update(Update { recipe, mut parameter, gradient, slots, learning_rate, .. }: Update<'_>) {
    mix(&mut slots[0], recipe.mean_square_decay(), &gradient.square());
    let mut change = gradient / (slots[0].sqrt() + recipe.epsilon());
    if let Some(buffer) = slots.get_mut(1) {
        change = buffer.g_mul_scalar_(recipe.momentum).g_add_(&change);
    }
    let _ = parameter.g_sub_(&(change * learning_rate));
}
