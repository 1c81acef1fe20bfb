//! One decoder layer: attention and MLP, each on a normalised input, each added to the residual stream.

use tch::Tensor;

use super::ModelError;
use super::attend::{Attend, AttendError};
use super::attention::Attention;
use super::config::ModelConfig;
use super::families::layer_tensor;
use super::lora::LayerLora;
use super::mlp::Mlp;
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
        rotation: &Rotation,
        lora: Option<&LayerLora<'_>>,
        attend: &mut dyn Attend,
    ) -> Result<Tensor, AttendError> {
        let norm = |x_bne: &Tensor, weight_e: &Tensor| rms_norm(x_bne, weight_e, self.eps);
        let attended_bne = self.attention.forward(&norm(hidden_bne, &self.attention_norm_e), rotation, lora, attend)?;
        let hidden_bne = hidden_bne + attended_bne;
        let added_bne = self.mlp.forward(&norm(&hidden_bne, &self.mlp_norm_e), lora);
        Ok(hidden_bne + added_bne)
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.attention_norm_e, &self.mlp_norm_e].into_iter().chain(self.attention.tensors()).chain(self.mlp.tensors())
    }
}
