//! A layer's attention but for the past: projections, head norms and positions; whoever remembers the past does the rest.

use tch::Tensor;

use super::ModelError;
use super::attend::{Attend, AttendError, Qkv};
use super::config::ModelConfig;
use super::dropout::TokenContext;
use super::linear::Linear;
use super::names::layer_tensor;
use super::weights::Weights;
use crate::ops::attention::ScoreRule;
use crate::ops::rms_norm::rms_norm;
use crate::ops::rope::Rotation;
use crate::units::LayerIdx;

#[derive(Debug)]
pub(super) struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    /// Norms over the channels of each head of queries and keys, in the families that have them.
    head_norms: Option<[Tensor; 2]>,
    layer: LayerIdx,
    /// Which of the model's rotations, if any.
    rotation: Option<usize>,
    head_dim: i64,
    rule: ScoreRule,
    eps: f64,
}

impl Attention {
    pub(super) fn load(weights: &Weights, config: &ModelConfig, layer: LayerIdx) -> Result<Self, ModelError> {
        let norm = |name: &str| weights.load(&layer_tensor(layer.0, name));
        let spec = &config.layers[layer.0].attention;
        let [query, key, value, output] = spec.linears(config.hidden_size);
        let linear = |spec| Linear::load(weights, layer, &spec);
        let head_norms =
            if spec.has_qk_norm { Some([norm("self_attn.q_norm.weight")?, norm("self_attn.k_norm.weight")?]) } else { None };
        Ok(Self {
            query: linear(query)?,
            key: linear(key)?,
            value: linear(value)?,
            output: linear(output)?,
            head_norms,
            layer,
            rotation: spec.rope.as_ref().map(|rope| config.rotations().iter().take_while(|of| **of != rope).count()),
            head_dim: spec.head_dim as i64,
            rule: spec.rule,
            eps: config.rms_norm_eps,
        })
    }

    /// Queries, keys and values, turned to their positions where the layer knows them.
    ///
    /// # Shapes
    /// `(B, n, E)` in; as in [`Qkv`] out.
    pub(super) fn project(&self, x_bne: &Tensor, rotations: &[Rotation], tokens: &TokenContext<'_>) -> [Tensor; 3] {
        let turned = |x: Tensor| self.rotation.map_or_else(|| x.shallow_clone(), |of| rotations[of].apply(&x));
        let norm_of = |i: usize| self.head_norms.as_ref().map(|norms| &norms[i]);
        let q_bhnd = turned(self.heads(&self.query.forward(x_bne, tokens), norm_of(0)));
        let k_bgnd = turned(self.heads(&self.key.forward(x_bne, tokens), norm_of(1)));
        let v_bgnd = self.heads(&self.value.forward(x_bne, tokens), None);
        [q_bhnd, k_bgnd, v_bgnd]
    }

    /// Asks whoever remembers the past.
    ///
    /// # Shapes
    /// As in [`Qkv`]; `(B, H, n, D)` out.
    pub(super) fn attend(&self, [q_bhnd, k_bgnd, v_bgnd]: [&Tensor; 3], attend: &mut dyn Attend) -> Result<Tensor, AttendError> {
        attend.attend(self.layer, Qkv { q_bhnd, k_bgnd, v_bgnd, rule: self.rule })
    }

    /// From the heads back to the residual stream.
    ///
    /// # Shapes
    /// `(B, H, n, D)` in, `(B, n, E)` out.
    pub(super) fn output(&self, attended_bhnd: &Tensor, tokens: &TokenContext<'_>) -> Tensor {
        self.output.forward(&attended_bhnd.transpose(1, 2).flatten(2, 3), tokens)
    }

    /// `(B, n, heads · D)` to `(B, heads, n, D)`.
    fn heads(&self, x_bni: &Tensor, norm_d: Option<&Tensor>) -> Tensor {
        let size = x_bni.size();
        let x_bnhd = x_bni.view([size[0], size[1], -1, self.head_dim]);
        norm_d.map_or_else(|| x_bnhd.shallow_clone(), |norm_d| rms_norm(&x_bnhd, norm_d, self.eps)).transpose(1, 2)
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.linears().into_iter().flat_map(Linear::tensors).chain(self.head_norms.iter().flatten())
    }

    /// In the order of [`super::AttentionSpec::linears`].
    pub(super) fn linears(&self) -> [&Linear; 4] {
        [&self.query, &self.key, &self.value, &self.output]
    }

    pub(super) fn linears_mut(&mut self) -> [&mut Linear; 4] {
        [&mut self.query, &mut self.key, &mut self.value, &mut self.output]
    }
}
