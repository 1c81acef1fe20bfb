//! A layer's gated MLP.

use tch::Tensor;

use super::ModelError;
use super::dropout::TokenContext;
use super::linear::Linear;
use super::spec::{Activation, LinearSpec};
use super::weights::Weights;
use crate::ops::clamped_swiglu::clamped_swiglu;
use crate::ops::geglu::geglu;
use crate::ops::linear::LowRank;
use crate::ops::swiglu::swiglu;
use crate::units::LayerIdx;

#[derive(Debug)]
pub(super) struct Mlp {
    gate_up: GateUp,
    down: Linear,
    activation: Activation,
}

/// What a token is turned into before its gate acts.
#[derive(Debug)]
enum GateUp {
    Apart([Linear; 2]),
    /// Both in one product: gate, and behind it up.
    Fused(Linear),
}

impl GateUp {
    fn linears(&self) -> &[Linear] {
        match self {
            Self::Apart(linears) => linears,
            Self::Fused(linear) => std::slice::from_ref(linear),
        }
    }

    fn linears_mut(&mut self) -> &mut [Linear] {
        match self {
            Self::Apart(linears) => linears,
            Self::Fused(linear) => std::slice::from_mut(linear),
        }
    }
}

impl Mlp {
    /// Of linears gate, up and down.
    pub(super) fn load(
        weights: &Weights,
        layer: LayerIdx,
        [gate, up, down]: [LinearSpec; 3],
        activation: Activation,
    ) -> Result<Self, ModelError> {
        let linear = |spec| Linear::load(weights, layer, &spec);
        Ok(Self { gate_up: GateUp::Apart([linear(gate)?, linear(up)?]), down: linear(down)?, activation })
    }

    /// Of a linear for gate and up, and down.
    pub(super) fn load_fused(
        weights: &Weights,
        layer: LayerIdx,
        [gate_up, down]: [LinearSpec; 2],
        activation: Activation,
    ) -> Result<Self, ModelError> {
        let linear = |spec| Linear::load(weights, layer, &spec);
        Ok(Self { gate_up: GateUp::Fused(linear(gate_up)?), down: linear(down)?, activation })
    }

    /// # Shapes
    /// `(B, n, E)` in and out.
    pub(super) fn forward(&self, x_bne: &Tensor, tokens: &TokenContext<'_>) -> Tensor {
        self.down.forward(&self.gated(|linear, _| linear.forward(x_bne, tokens)), tokens)
    }

    /// As [`Self::forward`] for some tokens by themselves, with low-rank matrices for gate, up and down that lie elsewhere.
    ///
    /// # Shapes
    /// `(N, E)` in and out.
    pub(super) fn forward_added(&self, x_ne: &Tensor, [gate, up, down]: [Option<LowRank<'_>>; 3]) -> Tensor {
        self.down.forward_added(&self.gated(|linear, index| linear.forward_added(x_ne, [gate, up][index])), down)
    }

    /// What `forward` makes by each of the linears before the gate, given with its number, and the gate of both. Gate and up are gone,
    /// but for what autograd keeps, before the next product.
    fn gated(&self, forward: impl Fn(&Linear, usize) -> Tensor) -> Tensor {
        match &self.gate_up {
            GateUp::Apart([gate, up]) => activated(self.activation, &forward(gate, 0), &forward(up, 1)),
            GateUp::Fused(linear) => {
                let both = forward(linear, 0);
                let half = both.size()[both.dim() - 1] / 2;
                activated(self.activation, &both.narrow(-1, 0, half), &both.narrow(-1, half, half))
            }
        }
    }

    /// In the order of [`super::FeedForwardSpec::linears`].
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.gate_up.linears().iter().chain([&self.down])
    }

    pub(super) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.gate_up.linears_mut().iter_mut().chain([&mut self.down])
    }
}

/// # Shapes
/// Two tensors of one shape in, the same shape out.
pub(super) fn activated(activation: Activation, gate: &Tensor, up: &Tensor) -> Tensor {
    match activation {
        Activation::Silu => swiglu(gate, up),
        Activation::GeluTanh => geglu(gate, up),
        Activation::ClampedSilu => clamped_swiglu(gate, up),
    }
}
