//! Optimisers, schedules and clipping, on named parameters; state that can be saved.

mod adamw;
mod clip;
mod optimizer;
mod schedule;

use tch::Tensor;

pub use adamw::AdamW;
pub use clip::clip_grad_norm;
pub use optimizer::{OptimError, Optimizer};
pub use schedule::learning_rate;

use crate::recipe::OptimizerRecipe;

/// The optimiser of a recipe, for `parameters`.
pub fn build(recipe: &OptimizerRecipe, parameters: &[(String, Tensor)]) -> Box<dyn Optimizer> {
    Box::new(AdamW::new(recipe, parameters))
}
