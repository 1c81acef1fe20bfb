//! Adam (Kingma & Ba 2015, arXiv 1412.6980) and, where weights decay by themselves, `AdamW` (Loshchilov & Hutter 2019, arXiv 1711.05101):
//! bias-corrected moments.

use super::update::{Rule, Update, mix};

/// Beside what it remembers it takes its denominator and its change.
pub(super) const RULE: Rule = Rule { slots: &["exp_avg", "exp_avg_sq"], update, tensors: 2 };

fn update(Update { recipe, mut parameter, gradient, slots, step, learning_rate }: Update<'_>) {
    let (b1, b2) = recipe.betas;
    let (correction1, correction2) = (1.0 - b1.powi(step), 1.0 - b2.powi(step));
    mix(&mut slots[0], b1, &gradient);
    mix(&mut slots[1], b2, &gradient.square());
    // In place where it can be: what a large matrix takes for a moment may be the most of a whole step.
    let mut spread = slots[1].sqrt();
    let _ = spread.g_div_scalar_(correction2.sqrt()).g_add_scalar_(recipe.epsilon());
    let mut change = &slots[0] / spread;
    let _ = parameter.g_sub_(&change.g_mul_scalar_(learning_rate / correction1));
}
