//! The projections of a layer, with or without a trained addition of low rank.

use tch::Tensor;

use super::ModelError;
use super::config::ModelConfig;
use super::lora::LayerLora;
use super::names::layer_tensor;
use super::spec::LayerSpec;
use super::weights::Weights;
use crate::ops::linear::{LowRank, linear};
use crate::units::LayerIdx;

/// A projection of a decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Projection {
    /// To queries.
    Query,
    /// To keys.
    Key,
    /// To values.
    Value,
    /// From the heads back to the residual stream.
    Output,
    /// To the MLP's gate.
    Gate,
    /// To what the gate lets through.
    Up,
    /// From the MLP back to the residual stream.
    Down,
}

impl Projection {
    /// All of a layer's, in the order in which they are computed.
    pub const ALL: [Self; 7] = [Self::Query, Self::Key, Self::Value, Self::Output, Self::Gate, Self::Up, Self::Down];

    /// The name by which PEFT and recipes target it: `q_proj`.
    pub fn name(self) -> &'static str {
        let path = self.path();
        path.rsplit_once('.').map_or(path, |(_, name)| name)
    }

    /// Its place inside the layer: `self_attn.q_proj`.
    pub fn path(self) -> &'static str {
        match self {
            Self::Query => "self_attn.q_proj",
            Self::Key => "self_attn.k_proj",
            Self::Value => "self_attn.v_proj",
            Self::Output => "self_attn.o_proj",
            Self::Gate => "mlp.gate_proj",
            Self::Up => "mlp.up_proj",
            Self::Down => "mlp.down_proj",
        }
    }

    /// The projection that PEFT means by a name or a path.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|projection| projection.name() == name || projection.path() == name)
    }

    /// `[out, in]` in a layer on a residual stream of width `hidden`.
    pub fn shape(self, spec: &LayerSpec, hidden: usize) -> [usize; 2] {
        let (attention, intermediate) = (&spec.attention, spec.feed_forward.intermediate_size());
        match self {
            Self::Query => [attention.num_heads * attention.head_dim, hidden],
            Self::Key | Self::Value => [attention.num_kv_heads * attention.head_dim, hidden],
            Self::Output => [hidden, attention.num_heads * attention.head_dim],
            Self::Gate | Self::Up => [intermediate, hidden],
            Self::Down => [hidden, intermediate],
        }
    }

    /// Whether it has a bias in such a layer.
    pub(super) fn has_bias(self, spec: &LayerSpec) -> bool {
        matches!(self, Self::Query | Self::Key | Self::Value) && spec.attention.has_qkv_bias
    }
}

/// A projection.
#[derive(Debug)]
pub(super) struct Linear {
    projection: Projection,
    weight_oi: Tensor,
    bias_o: Option<Tensor>,
}

impl Linear {
    pub(super) fn load(
        weights: &Weights,
        config: &ModelConfig,
        layer: LayerIdx,
        projection: Projection,
    ) -> Result<Self, ModelError> {
        let tensor = |part: &str| weights.load(&layer_tensor(layer.0, &format!("{}.{part}", projection.path())));
        let bias_o = if projection.has_bias(&config.layers[layer.0]) { Some(tensor("bias")?) } else { None };
        Ok(Self { projection, weight_oi: tensor("weight")?, bias_o })
    }

    /// `x W^T + b`, and the adapter's addition where there is one. Where the weight is frozen, autograd keeps no `x` for it.
    ///
    /// # Shapes
    /// `(B, n, in)` in, `(B, n, out)` out.
    pub(super) fn forward(&self, x_bni: &Tensor, lora: Option<&LayerLora<'_>>) -> Tensor {
        let Some((lora, pair)) = lora.and_then(|lora| Some((lora, lora.pair(self.projection)?))) else {
            return linear(x_bni, &self.weight_oi, self.bias_o.as_ref(), None);
        };
        let dropped_bni = lora.dropped(self.projection, x_bni);
        let addition = LowRank { x_bni: dropped_bni.as_ref(), ..pair };
        linear(x_bni, &self.weight_oi, self.bias_o.as_ref(), Some(addition))
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(&self.weight_oi).chain(&self.bias_o)
    }
}
