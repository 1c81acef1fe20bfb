//! What the rules of optimisers change, and on what.

use tch::Tensor;

use super::clip::SQUARED_AT_ONCE;
use crate::recipe::{OptimizerName, OptimizerRecipe};

/// One update of one parameter. Everything is in the parameter's own kind, f32 for f32 masters.
pub(super) struct Update<'a> {
    pub(super) recipe: &'a OptimizerRecipe,
    pub(super) parameter: Tensor,
    /// With weight decay added, where it goes through the gradient.
    pub(super) gradient: Tensor,
    /// What is remembered, tensors of the parameter's size that begin at zero.
    pub(super) slots: &'a mut [Tensor],
    /// Counted from 1, on which the correction of biases depends.
    pub(super) step: i32,
    pub(super) learning_rate: f64,
}

/// The most bytes that clipping and updating a tensor of so many numbers, of `wide` bytes each, take for a moment.
pub fn update_bytes(recipe: &OptimizerRecipe, numbers: u64, wide: u64) -> u64 {
    // As measured: Adam's are its denominator and its change; moments of 8 bits are unpacked, and found in a table again.
    let of_number = match recipe.name {
        OptimizerName::AdamW | OptimizerName::Adam | OptimizerName::Sgd | OptimizerName::RmsProp => 2 * wide,
        OptimizerName::Adamax => 3 * wide,
        OptimizerName::Adadelta => 5 * wide,
        OptimizerName::AdamW8bit => 30,
    };
    // Where weights decay through the gradient, it is copied.
    let of_decay = if recipe.decays_apart() || recipe.decay() <= 0.0 { 0 } else { wide };
    (numbers * (of_number + of_decay)).max(16 * numbers.min(SQUARED_AT_ONCE as u64))
}

/// `slot ← decay · slot + (1 − decay) · value`.
pub(super) fn mix(slot: &mut Tensor, decay: f64, value: &Tensor) {
    let _ = slot.g_mul_scalar_(decay).g_add_(&(value * (1.0 - decay)));
}
