//! Adamax (Kingma & Ba 2015, arXiv 1412.6980, section 7.1): Adam with the largest gradient, forgotten slowly, in place of the mean square.

use super::update::{Rule, Update, mix};

pub(super) const RULE: Rule = Rule { slots: &["exp_avg", "exp_inf"], update, tensors: 3 };

fn update(Update { recipe, mut parameter, gradient, slots, step, learning_rate }: Update<'_>) {
    let (b1, b2) = recipe.betas;
    mix(&mut slots[0], b1, &gradient);
    let largest = (&slots[1] * b2).maximum(&(gradient.abs() + recipe.epsilon()));
    slots[1].copy_(&largest);
    let _ = parameter.g_sub_(&(&slots[0] / largest * (learning_rate / (1.0 - b1.powi(step)))));
}
