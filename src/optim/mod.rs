//! Optimisers, schedules and clipping, on named parameters; state that can be saved.

mod adadelta;
mod adam;
mod adamax;
mod clip;
mod optimizer;
mod rmsprop;
mod rule;
mod rule_optimizer;
mod schedule;
mod sgd;
#[cfg(test)]
mod tests;

use tch::Tensor;

pub use clip::clip_grad_norm;
pub use optimizer::{OptimError, Optimizer};
pub use schedule::learning_rate;

use crate::recipe::{OptimizerName, OptimizerRecipe};

/// The optimiser of a recipe, for `parameters`. A further one is one file, a name in the recipe, and a line here.
pub fn build(recipe: &OptimizerRecipe, parameters: &[(String, Tensor)]) -> Box<dyn Optimizer> {
    Box::new(rule_optimizer::RuleOptimizer::new(rule(recipe), recipe.loraplus_lr_ratio, parameters))
}

fn rule(recipe: &OptimizerRecipe) -> Box<dyn rule::Rule> {
    let OptimizerRecipe { betas, momentum, .. } = *recipe;
    let (eps, weight_decay, smoothing) = (recipe.epsilon(), recipe.decay(), recipe.mean_square_decay());
    match recipe.name {
        OptimizerName::AdamW => Box::new(adam::Adam { betas, eps, weight_decay, is_decoupled: true }),
        OptimizerName::Adam => Box::new(adam::Adam { betas, eps, weight_decay, is_decoupled: false }),
        OptimizerName::Sgd => Box::new(sgd::Sgd { weight_decay, momentum, is_nesterov: recipe.nesterov }),
        OptimizerName::RmsProp => Box::new(rmsprop::RmsProp { smoothing, eps, weight_decay, momentum }),
        OptimizerName::Adadelta => Box::new(adadelta::Adadelta { smoothing, eps, weight_decay }),
        OptimizerName::Adamax => Box::new(adamax::Adamax { betas, eps, weight_decay }),
    }
}
