//! Adadelta (Zeiler 2012, arXiv 1212.5701): steps as long as the mean of the last ones.

use super::update::{Rule, Update, mix};

pub(super) const RULE: Rule = Rule { slots: &["square_avg", "acc_delta"], update, tensors: 5 };

fn update(Update { recipe, mut parameter, gradient, slots, learning_rate, .. }: Update<'_>) {
    let (smoothing, eps) = (recipe.mean_square_decay(), recipe.epsilon());
    mix(&mut slots[0], smoothing, &gradient.square());
    let delta = (&slots[1] + eps).sqrt() / (&slots[0] + eps).sqrt() * gradient;
    mix(&mut slots[1], smoothing, &delta.square());
    let _ = parameter.g_sub_(&(delta * learning_rate));
}
