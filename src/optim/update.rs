//! What the rules of optimisers change, and on what.

use tch::Tensor;

use crate::recipe::OptimizerRecipe;

/// What an optimiser remembers, and what it does.
pub(super) struct Rule {
    /// The ends of the names of what is remembered of a parameter: those of `torch.optim`.
    pub(super) slots: &'static [&'static str],
    /// Changes the parameter and what is remembered, in place.
    pub(super) update: fn(Update<'_>),
    /// Tensors of the parameter's size that an update takes for a moment, as measured.
    pub(super) tensors: u64,
}

/// The slot that there is only with momentum.
pub(super) const MOMENTUM: &str = "momentum_buffer";

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

/// `slot ← decay · slot + (1 − decay) · value`.
pub(super) fn mix(slot: &mut Tensor, decay: f64, value: &Tensor) {
    let _ = slot.g_mul_scalar_(decay).g_add_(&(value * (1.0 - decay)));
}
