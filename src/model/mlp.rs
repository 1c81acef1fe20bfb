//! A layer's gated MLP.

use tch::Tensor;

use super::linear::Linear;
use super::positions::TokenContext;
use super::spec::{Activation, LinearSpec};
use super::weights::Weights;
use crate::ops::clamped_swiglu::clamped_swiglu;
use crate::ops::geglu::geglu;
use crate::ops::linear::LowRank;
use crate::ops::swiglu::swiglu;
use crate::units::{Fault, LayerIdx};

#[derive(Debug)]
pub(super) struct Mlp {
    /// Gate and up, or one linear with up behind gate.
    inputs: Vec<Linear>,
    down: Linear,
    activation: Activation,
}

impl Mlp {
    /// Loads the linears of `specs`: those before the gate, and then the one behind it.
    pub(super) fn load(weights: &Weights, layer: LayerIdx, specs: &[LinearSpec], activation: Activation) -> Result<Self, Fault> {
        let mut inputs = specs.iter().map(|spec| Linear::load(weights, layer, spec, false)).collect::<Result<Vec<_>, _>>()?;
        let down = inputs.remove(specs.len() - 1);
        Ok(Self { inputs, down, activation })
    }

    /// # Shapes
    /// `(B, n, E)` in and out.
    pub(super) fn forward(&self, x_bne: &Tensor, tokens: &TokenContext<'_>) -> Tensor {
        self.down.forward(&self.gated(|linear, _| linear.forward(x_bne, tokens)), tokens)
    }

    /// Computes as [`Self::forward`] for some tokens by themselves, with low-rank matrices for gate, up and down that lie elsewhere.
    ///
    /// # Shapes
    /// `(N, E)` in and out.
    pub(super) fn forward_added(&self, x_ne: &Tensor, [gate, up, down]: [Option<LowRank<'_>>; 3]) -> Tensor {
        self.down.forward_added(&self.gated(|linear, index| linear.forward_added(x_ne, [gate, up][index])), down)
    }

    /// What `forward` makes by each of the linears before the gate, given with its number, and the gate of both. Gate and up are gone,
    /// but for what autograd keeps, before the next product.
    fn gated(&self, forward: impl Fn(&Linear, usize) -> Tensor) -> Tensor {
        if let [gate, up] = &self.inputs[..] {
            return activated(self.activation, &forward(gate, 0), &forward(up, 1));
        }
        let both = forward(&self.inputs[0], 0);
        let half = both.size()[both.dim() - 1] / 2;
        activated(self.activation, &both.narrow(-1, 0, half), &both.narrow(-1, half, half))
    }

    /// In the order of [`super::FeedForwardSpec::linears`].
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.inputs.iter().chain([&self.down])
    }

    pub(super) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.inputs.iter_mut().chain([&mut self.down])
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
