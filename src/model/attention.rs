//! A layer's attention but for the past: projections, head norms and positions; whoever remembers the past does the rest.

use tch::Tensor;

use super::ModelError;
use super::attend::{Attend, AttendError, Qkv};
use super::config::ModelConfig;
use super::dropout::TokenContext;
use super::linear::Linear;
use super::names::layer_tensor;
use super::norm::RmsNorm;
use super::spec::{AttentionSpec, DRAIN, NormSpec, QkNorm, QueryGrowth};
use super::weights::Weights;
use crate::ops::attention::{ScoreRule, accumulation_kind};
use crate::ops::rope::Rotation;
use crate::units::LayerIdx;

#[derive(Debug)]
pub(super) struct Attention {
    inputs: QkvLinears,
    output: Linear,
    /// Norms of queries and of keys, and over which of their channels, in the families that have them.
    norms: Option<(QkNorm, [RmsNorm; 2])>,
    query_growth: Option<QueryGrowth>,
    layer: LayerIdx,
    /// Which of the model's rotations, if any.
    rotation: Option<usize>,
    head_dim: i64,
    rule: ScoreRule,
    drain_h: Option<Tensor>,
}

/// The linears to queries, keys and values.
#[derive(Debug)]
enum QkvLinears {
    Apart(Box<[Linear; 3]>),
    /// All in one product, and how many channels of it are queries, keys and values.
    Fused(Linear, [i64; 3]),
}

impl QkvLinears {
    fn load(weights: &Weights, layer: LayerIdx, spec: &AttentionSpec, hidden: usize) -> Result<Self, ModelError> {
        if spec.is_fused {
            let linear = Linear::load(weights, layer, &spec.fused_input(hidden))?;
            return Ok(Self::Fused(linear, spec.widths().map(|width| width as i64)));
        }
        let [query, key, value] = spec.inputs(hidden).map(|linear| Linear::load(weights, layer, &linear));
        Ok(Self::Apart(Box::new([query?, key?, value?])))
    }

    /// `(B, n, E)` to thrice `(B, n, heads · D)`.
    fn forward(&self, x_bne: &Tensor, tokens: &TokenContext<'_>) -> [Tensor; 3] {
        match self {
            Self::Apart(linears) => linears.each_ref().map(|linear| linear.forward(x_bne, tokens)),
            Self::Fused(linear, [queries, keys, values]) => {
                let all = linear.forward(x_bne, tokens);
                [(0, queries), (*queries, keys), (queries + keys, values)].map(|(start, &width)| all.narrow(-1, start, width))
            }
        }
    }

    fn linears(&self) -> &[Linear] {
        match self {
            Self::Apart(linears) => &linears[..],
            Self::Fused(linear, _) => std::slice::from_ref(linear),
        }
    }

    fn linears_mut(&mut self) -> &mut [Linear] {
        match self {
            Self::Apart(linears) => &mut linears[..],
            Self::Fused(linear, _) => std::slice::from_mut(linear),
        }
    }
}

impl Attention {
    pub(super) fn load(weights: &Weights, config: &ModelConfig, layer: LayerIdx) -> Result<Self, ModelError> {
        let spec = &config.layers[layer.0].attention;
        let norm = |of: NormSpec| RmsNorm::load(weights, config, &layer_tensor(layer.0, &format!("{}.weight", of.path)));
        let norms = match spec.qk_norm.zip(spec.norms()) {
            Some((kind, [of_queries, of_keys])) => Some((kind, [norm(of_queries)?, norm(of_keys)?])),
            None => None,
        };
        Ok(Self {
            inputs: QkvLinears::load(weights, layer, spec, config.hidden_size)?,
            output: Linear::load(weights, layer, &spec.output(config.hidden_size))?,
            norms,
            query_growth: spec.query_growth,
            layer,
            rotation: spec.rope.as_ref().map(|rope| config.rotations().iter().take_while(|of| **of != rope).count()),
            head_dim: spec.head_dim as i64,
            rule: spec.rule,
            drain_h: if spec.has_drain { Some(weights.load(&layer_tensor(layer.0, DRAIN))?) } else { None },
        })
    }

    /// Queries, keys and values, turned to their positions where the layer knows them.
    ///
    /// # Shapes
    /// `(B, n, E)` in; as in [`Qkv`] out.
    pub(super) fn project(&self, x_bne: &Tensor, rotations: &[Rotation], tokens: &TokenContext<'_>) -> [Tensor; 3] {
        let turned = |x: Tensor| self.rotation.map_or_else(|| x.shallow_clone(), |of| rotations[of].apply(&x));
        let norm_of = |i: usize| self.norms.as_ref().map(|(kind, norms)| (*kind, &norms[i]));
        let [q_bni, k_bni, v_bni] = self.inputs.forward(x_bne, tokens);
        let q_bhnd = self.grown(turned(self.heads(&q_bni, norm_of(0))), tokens);
        let k_bgnd = turned(self.heads(&k_bni, norm_of(1)));
        [q_bhnd, k_bgnd, self.heads(&v_bni, None)]
    }

    /// Queries with the factor of their positions.
    ///
    /// # Shapes
    /// `(B, H, n, D)` in and out.
    fn grown(&self, q_bhnd: Tensor, tokens: &TokenContext<'_>) -> Tensor {
        let Some(QueryGrowth { beta, original }) = self.query_growth else { return q_bhnd };
        let step_bn = tokens.position_bn.atleast_2d().floor_divide_scalar(original as i64);
        let factor_bn = (step_bn + 1).to_kind(accumulation_kind(q_bhnd.kind())).log() * beta + 1.0;
        // (B, n) -> (B, 1, n, 1).
        &q_bhnd * factor_bn.to_kind(q_bhnd.kind()).unsqueeze(1).unsqueeze(-1)
    }

    /// Asks whoever remembers the past.
    ///
    /// # Shapes
    /// As in [`Qkv`]; `(B, H, n, D)` out.
    pub(super) fn attend(&self, [q_bhnd, k_bgnd, v_bgnd]: [&Tensor; 3], attend: &mut dyn Attend) -> Result<Tensor, AttendError> {
        let drain_h = self.drain_h.as_ref().map(Tensor::shallow_clone);
        attend.attend(self.layer, Qkv { drain_h, ..Qkv::new(q_bhnd, k_bgnd, v_bgnd, self.rule) })
    }

    /// From the heads back to the residual stream.
    ///
    /// # Shapes
    /// `(B, H, n, D)` in, `(B, n, E)` out.
    pub(super) fn output(&self, attended_bhnd: &Tensor, tokens: &TokenContext<'_>) -> Tensor {
        self.output.forward(&attended_bhnd.transpose(1, 2).flatten(2, 3), tokens)
    }

    /// `(B, n, heads · D)` to `(B, heads, n, D)`.
    fn heads(&self, x_bni: &Tensor, norm: Option<(QkNorm, &RmsNorm)>) -> Tensor {
        let size = x_bni.size();
        let apart = |x_bni: &Tensor| x_bni.view([size[0], size[1], -1, self.head_dim]);
        let x_bnhd = match norm {
            None => apart(x_bni),
            Some((QkNorm::PerHead, norm)) => norm.apply(&apart(x_bni)),
            Some((QkNorm::FullWidth, norm)) => apart(&norm.apply(x_bni)),
        };
        x_bnhd.transpose(1, 2)
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let norms = self.norms.iter().flat_map(|(_, norms)| norms).map(RmsNorm::tensor);
        self.linears().flat_map(Linear::tensors).chain(norms).chain(&self.drain_h)
    }

    /// Those of queries and of keys.
    pub(super) fn norms_mut(&mut self) -> impl Iterator<Item = &mut RmsNorm> {
        self.norms.iter_mut().flat_map(|(_, norms)| norms)
    }

    /// In the order of [`super::AttentionSpec::linears`].
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.inputs.linears().iter().chain([&self.output])
    }

    pub(super) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.inputs.linears_mut().iter_mut().chain([&mut self.output])
    }
}
