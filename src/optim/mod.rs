//! Optimisers, schedules and clipping, on named parameters; state that can be saved.

mod adadelta;
mod adam;
mod adamax;
mod clip;
mod dynamic_map;
mod optimizer;
mod remembered;
mod rmsprop;
mod rule;
mod schedule;
mod sgd;
#[cfg(test)]
mod tests;

use tch::{Device, Tensor};

pub use clip::{clip_grad_norm, in_one_place};
pub use optimizer::Optimizer;
pub use schedule::learning_rate;

use dynamic_map::DynamicMap;
use remembered::StateForm;

use crate::recipe::{Offload, OptimizerName, OptimizerRecipe};

/// The optimiser of a recipe, for `parameters` of a model on `device`; its state waits where `offload` says. A further one is one
/// rule in a file, a name in the recipe, and a line here.
pub fn build(recipe: &OptimizerRecipe, offload: Offload, parameters: &[(String, Tensor)], device: Device) -> Optimizer {
    // The mean gradient has a sign, its mean square has none.
    let is_in_8_bits = recipe.name == OptimizerName::AdamW8bit;
    let maps = if is_in_8_bits { vec![DynamicMap::new(true), DynamicMap::new(false)] } else { Vec::new() };
    let form = StateForm { maps, is_on_host: offload != Offload::None };
    Optimizer::new(rule(recipe), recipe.loraplus_lr_ratio, form, parameters, device)
}

fn rule(recipe: &OptimizerRecipe) -> Box<dyn rule::Rule> {
    let OptimizerRecipe { betas, momentum, dampening, nesterov: is_nesterov, .. } = *recipe;
    let (eps, weight_decay, smoothing) = (recipe.epsilon(), recipe.decay(), recipe.mean_square_decay());
    match recipe.name {
        OptimizerName::AdamW | OptimizerName::AdamW8bit => Box::new(adam::Adam { betas, eps, weight_decay, is_decoupled: true }),
        OptimizerName::Adam => Box::new(adam::Adam { betas, eps, weight_decay, is_decoupled: false }),
        OptimizerName::Sgd => Box::new(sgd::Sgd { weight_decay, momentum, dampening, is_nesterov }),
        OptimizerName::RmsProp => Box::new(rmsprop::RmsProp { smoothing, eps, weight_decay, momentum }),
        OptimizerName::Adadelta => Box::new(adadelta::Adadelta { smoothing, eps, weight_decay }),
        OptimizerName::Adamax => Box::new(adamax::Adamax { betas, eps, weight_decay }),
    }
}
