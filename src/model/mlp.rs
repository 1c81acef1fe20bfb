//! A layer's gated MLP.

use tch::Tensor;

use super::ModelError;
use super::dropout::TokenContext;
use super::linear::Linear;
use super::spec::LinearSpec;
use super::weights::Weights;
use crate::ops::linear::LowRank;
use crate::ops::swiglu::swiglu;
use crate::units::LayerIdx;

#[derive(Debug)]
pub(super) struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Mlp {
    /// Of linears gate, up and down.
    pub(super) fn load(weights: &Weights, layer: LayerIdx, [gate, up, down]: [LinearSpec; 3]) -> Result<Self, ModelError> {
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

    /// As [`Self::forward`] for some tokens by themselves, with low-rank matrices for gate, up and down that lie elsewhere.
    ///
    /// # Shapes
    /// `(N, E)` in and out.
    pub(super) fn forward_added(&self, x_ne: &Tensor, [gate, up, down]: [Option<LowRank<'_>>; 3]) -> Tensor {
        let gated_ni = swiglu(&self.gate.forward_added(x_ne, gate), &self.up.forward_added(x_ne, up));
        self.down.forward_added(&gated_ni, down)
    }

    /// In the order of [`super::FeedForwardSpec::linears`].
    pub(super) fn linears(&self) -> [&Linear; 3] {
        [&self.gate, &self.up, &self.down]
    }

    pub(super) fn linears_mut(&mut self) -> [&mut Linear; 3] {
        [&mut self.gate, &mut self.up, &mut self.down]
    }
}
