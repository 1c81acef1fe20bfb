//! A layer's gated MLP.

use tch::Tensor;

use super::ModelError;
use super::config::ModelConfig;
use super::linear::{Linear, Projection};
use super::lora::LayerLora;
use super::weights::Weights;
use crate::ops::swiglu::swiglu;
use crate::units::LayerIdx;

#[derive(Debug)]
pub(super) struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Mlp {
    pub(super) fn load(weights: &Weights, config: &ModelConfig, layer: LayerIdx) -> Result<Self, ModelError> {
        let linear = |projection| Linear::load(weights, config, layer, projection);
        Ok(Self { gate: linear(Projection::Gate)?, up: linear(Projection::Up)?, down: linear(Projection::Down)? })
    }

    /// # Shapes
    /// `(B, n, E)` in and out.
    pub(super) fn forward(&self, x_bne: &Tensor, lora: Option<&LayerLora<'_>>) -> Tensor {
        // Gate and up are gone, but for what autograd keeps, before the next product.
        let gated_bni = swiglu(&self.gate.forward(x_bne, lora), &self.up.forward(x_bne, lora));
        self.down.forward(&gated_bni, lora)
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.gate, &self.up, &self.down].into_iter().flat_map(Linear::tensors)
    }
}
