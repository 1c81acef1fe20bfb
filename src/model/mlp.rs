//! A layer's gated MLP.

use tch::Tensor;

use super::ModelError;
use super::config::ModelConfig;
use super::dropout::TokenContext;
use super::linear::Linear;
use super::spec::{FeedForwardSpec, gated_linears};
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
        let FeedForwardSpec::Dense { intermediate_size, has_bias } = config.layers[layer.0].feed_forward;
        let [gate, up, down] = gated_linears(intermediate_size, config.hidden_size, has_bias);
        let linear = |spec| Linear::load(weights, layer, &spec);
        Ok(Self { gate: linear(gate)?, up: linear(up)?, down: linear(down)? })
    }

    /// # Shapes
    /// `(B, n, E)` in and out.
    pub(super) fn forward(&self, x_bne: &Tensor, tokens: &TokenContext<'_>) -> Tensor {
        // Gate and up are gone, but for what autograd keeps, before the next product.
        let gated_bni = swiglu(&self.gate.forward(x_bne, tokens), &self.up.forward(x_bne, tokens));
        self.down.forward(&gated_bni, tokens)
    }

    /// In the order of [`FeedForwardSpec::linears`].
    pub(super) fn linears(&self) -> [&Linear; 3] {
        [&self.gate, &self.up, &self.down]
    }

    pub(super) fn linears_mut(&mut self) -> [&mut Linear; 3] {
        [&mut self.gate, &mut self.up, &mut self.down]
    }
}
