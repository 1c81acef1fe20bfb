//! One decoder layer: attention and MLP, each on a normalised input, each added to the residual stream.

use tch::Tensor;

use super::ModelError;
use super::attend::{Attend, AttendError};
use super::attention::Attention;
use super::config::ModelConfig;
use super::dropout::TokenContext;
use super::linear::Linear;
use super::mlp::Mlp;
use super::names::layer_tensor;
use super::weights::Weights;
use crate::ops::rms_norm::rms_norm;
use crate::ops::rope::Rotation;
use crate::units::LayerIdx;

#[derive(Debug)]
pub(super) struct DecoderLayer {
    attention_norm_e: Tensor,
    attention: Attention,
    mlp_norm_e: Tensor,
    mlp: Mlp,
    eps: f64,
}

impl DecoderLayer {
    pub(super) fn load(weights: &Weights, config: &ModelConfig, layer: LayerIdx) -> Result<Self, ModelError> {
        let norm = |name: &str| weights.load(&layer_tensor(layer.0, name));
        Ok(Self {
            attention_norm_e: norm("input_layernorm.weight")?,
            attention: Attention::load(weights, config, layer)?,
            mlp_norm_e: norm("post_attention_layernorm.weight")?,
            mlp: Mlp::load(weights, config, layer)?,
            eps: config.rms_norm_eps,
        })
    }

    /// # Shapes
    /// `(B, n, E)` in and out.
    pub(super) fn forward(
        &self,
        hidden_bne: &Tensor,
        rotations: &[Rotation],
        tokens: &TokenContext<'_>,
        attend: &mut dyn Attend,
    ) -> Result<Tensor, AttendError> {
        let [q_bhnd, k_bgnd, v_bgnd] = self.before_attention(hidden_bne, rotations, tokens);
        let attended_bhnd = self.attend([&q_bhnd, &k_bgnd, &v_bgnd], attend)?;
        drop([q_bhnd, k_bgnd, v_bgnd]);
        Ok(self.after_attention(hidden_bne, attended_bhnd, tokens))
    }

    /// Queries, keys and values.
    ///
    /// # Shapes
    /// `(B, n, E)` in; as in [`super::Qkv`] out.
    pub(super) fn before_attention(&self, hidden_bne: &Tensor, rotations: &[Rotation], tokens: &TokenContext<'_>) -> [Tensor; 3] {
        self.attention.project(&rms_norm(hidden_bne, &self.attention_norm_e, self.eps), rotations, tokens)
    }

    /// What follows attention: the layer's output. What was attended is gone, but for what autograd keeps, before the MLP.
    ///
    /// # Shapes
    /// The layer's input `(B, n, E)` and what was attended `(B, H, n, D)` in, `(B, n, E)` out.
    pub(super) fn after_attention(&self, hidden_bne: &Tensor, attended_bhnd: Tensor, tokens: &TokenContext<'_>) -> Tensor {
        let hidden_bne = hidden_bne + self.attention.output(&attended_bhnd, tokens);
        drop(attended_bhnd);
        let added_bne = self.mlp.forward(&rms_norm(&hidden_bne, &self.mlp_norm_e, self.eps), tokens);
        hidden_bne + added_bne
    }

    /// Asks whoever remembers the past.
    pub(super) fn attend(&self, qkv: [&Tensor; 3], attend: &mut dyn Attend) -> Result<Tensor, AttendError> {
        self.attention.attend(qkv, attend)
    }

    /// The tensors of the model itself.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let of_mlp = self.mlp.linears().into_iter().flat_map(Linear::tensors);
        [&self.attention_norm_e, &self.mlp_norm_e].into_iter().chain(self.attention.tensors()).chain(of_mlp)
    }

    /// In the order of [`super::LayerSpec::linears`].
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.attention.linears().into_iter().chain(self.mlp.linears())
    }

    pub(super) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.attention.linears_mut().into_iter().chain(self.mlp.linears_mut())
    }
}
