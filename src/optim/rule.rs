//! What optimisers differ in: what they do to one parameter, and what they remember of it.

use std::fmt::Debug;

use tch::Tensor;

/// One update of one parameter. Everything is in the parameter's own kind, f32 for f32 masters.
pub(super) struct Update<'a> {
    pub(super) parameter: Tensor,
    pub(super) gradient: Tensor,
    /// What is remembered, in the order of [`Rule::slots`].
    pub(super) slots: &'a mut [Tensor],
    /// Counted from 1, on which the correction of biases depends.
    pub(super) step: i32,
    pub(super) learning_rate: f64,
}

pub(super) trait Rule: Debug + Send {
    /// The ends of the names of what it remembers of a parameter, tensors of its size that begin at zero: those of `torch.optim`.
    fn slots(&self) -> &'static [&'static str];

    /// Changes the parameter and what is remembered, in place.
    fn update(&self, at: Update<'_>);
}

impl Update<'_> {
    /// Adds weight decay to the gradient, as all optimisers but `AdamW` have it.
    pub(super) fn decay_in_gradient(&mut self, weight_decay: f64) {
        if weight_decay > 0.0 {
            self.gradient = &self.gradient + &self.parameter * weight_decay;
        }
    }

    /// `slot ← decay · slot + (1 − decay) · value`.
    pub(super) fn mix(&mut self, slot: usize, decay: f64, value: &Tensor) {
        let _ = self.slots[slot].g_mul_scalar_(decay).g_add_(&(value * (1.0 - decay)));
    }
}
