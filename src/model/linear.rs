//! A linear of a layer: its weight, and what is trained beside it.

use tch::Tensor;

use super::ModelError;
use super::delta::Delta;
use super::dropout::TokenContext;
use super::names::layer_tensor;
use super::spec::LinearSpec;
use super::weights::Weights;
use crate::ops::linear::{LowRank, linear};
use crate::units::LayerIdx;

/// `x W^T + b`, and what its delta adds.
#[derive(Debug)]
pub(super) struct Linear {
    /// In the model: `model.layers.3.mlp.up_proj`.
    pub(super) name: String,
    weight_oi: Tensor,
    bias_o: Option<Tensor>,
    pub(super) delta: Option<Delta>,
}

impl Linear {
    pub(super) fn load(weights: &Weights, layer: LayerIdx, spec: &LinearSpec) -> Result<Self, ModelError> {
        let name = layer_tensor(layer.0, &spec.path);
        let tensor = |part: &str| weights.load(&format!("{name}.{part}"));
        let bias_o = if spec.has_bias { Some(tensor("bias")?) } else { None };
        Ok(Self { weight_oi: tensor("weight")?, bias_o, delta: None, name })
    }

    /// Where the weight is frozen, autograd keeps no `x` for it.
    ///
    /// # Shapes
    /// `(B, n, in)` in, `(B, n, out)` out.
    pub(super) fn forward(&self, x_bni: &Tensor, tokens: &TokenContext<'_>) -> Tensor {
        let with = |low_rank| linear(x_bni, &self.weight_oi, self.bias_o.as_ref(), low_rank);
        match &self.delta {
            None => with(None),
            Some(Delta::Lora(lora)) => {
                let dropped_bni = lora.dropped(x_bni, tokens);
                with(Some(lora.low_rank(dropped_bni.as_ref())))
            }
        }
    }

    /// As [`Self::forward`] without dropout, with matrices of low rank that lie elsewhere, or else its own.
    ///
    /// # Shapes
    /// `(N, in)` in, `(N, out)` out.
    pub(super) fn forward_added(&self, x_ni: &Tensor, elsewhere: Option<LowRank<'_>>) -> Tensor {
        let own = || self.delta.as_ref().map(|Delta::Lora(lora)| lora.low_rank(None));
        linear(x_ni, &self.weight_oi, self.bias_o.as_ref(), elsewhere.or_else(own))
    }

    /// The tensors of the model itself.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(&self.weight_oi).chain(&self.bias_o)
    }
}
