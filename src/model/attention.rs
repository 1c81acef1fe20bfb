//! A layer's attention but for the past: projections, head norms and positions; whoever remembers the past does the rest.

use tch::{Tensor, no_grad};

use super::attend::{Attend, Qkv};
use super::config::ModelConfig;
use super::gates::{Gate, Gates};
use super::linear::Linear;
use super::names::layer_tensor;
use super::positions::{DropoutContext, TokenContext};
use super::spec::{AttentionSpec, LinearSpec, NormSpec, QkNorm, QueryGrowth, SINKS};
use super::vectors::{CopyableVector, RmsNorm};
use super::weights::Weights;
use crate::ops::attention::{ModelFeature, accumulation_kind};
use crate::ops::frequencies::Frequencies;
use crate::ops::query_statistics::QueryStatistics;
use crate::ops::rope::Rotation;
use crate::units::{Fault, LayerIdx};

#[derive(Debug)]
pub(super) struct Attention {
    /// To queries, keys and values, or one to all of them.
    inputs: Vec<Linear>,
    output: Linear,
    /// Norms of queries and of keys, in the families that have them.
    norms: Option<[RmsNorm; 2]>,
    spec: AttentionSpec,
    layer: LayerIdx,
    rotation: Option<usize>,
    sinks: Option<CopyableVector>,
    /// What scores new entries for a policy that is learned.
    pub(super) gate: Option<Gate>,
    /// What [`QuerySums::statistics`](crate::ops::query_statistics::QuerySums::statistics) made of its queries, for a policy that needs it.
    pub(super) query_statistics: Option<[Tensor; 2]>,
}

impl Attention {
    pub(super) fn load(weights: &Weights, config: &ModelConfig, layer: LayerIdx) -> Result<Self, Fault> {
        let spec = &config.layers[layer.0].attention;
        let norm = |of: NormSpec| RmsNorm::load(weights, config, &layer_tensor(layer.0, &format!("{}.weight", of.path)));
        let norms = spec.norms().map(|[of_queries, of_keys]| Ok::<_, Fault>([norm(of_queries)?, norm(of_keys)?]));
        let sinks = || CopyableVector::load(layer_tensor(layer.0, SINKS), |name| weights.load(name));
        let linear = |spec: &LinearSpec| Linear::load(weights, layer, spec, false);
        Ok(Self {
            inputs: spec.inputs(config.hidden_size).iter().map(linear).collect::<Result<_, _>>()?,
            output: linear(&spec.output(config.hidden_size))?,
            norms: norms.transpose()?,
            spec: spec.clone(),
            layer,
            rotation: spec.rope.as_ref().map(|rope| config.rotations().iter().take_while(|of| **of != rope).count()),
            sinks: spec.has_sinks.then(sinks).transpose()?,
            gate: None,
            query_statistics: None,
        })
    }

    /// Queries, keys and values, rotated to their positions where the layer knows them: `(B, n, E)` in; as in [`Qkv`] out.
    pub(super) fn project(&self, x_bne: &Tensor, rotations: &[Rotation], tokens: &TokenContext<'_>) -> [Tensor; 3] {
        let rotated = |x: Tensor| self.rotation.map_or_else(|| x.shallow_clone(), |of| rotations[of].apply(&x));
        let [q_bni, k_bni, v_bni] = self.inputs(x_bne, tokens);
        let q_bhnd = self.grown(rotated(self.heads(&q_bni, self.norm_of(0))), tokens);
        let k_bgnd = rotated(self.heads(&k_bni, self.norm_of(1)));
        [q_bhnd, k_bgnd, self.heads(&v_bni, None)]
    }

    /// The norm of queries (0) or of keys (1).
    fn norm_of(&self, part: usize) -> Option<(QkNorm, &RmsNorm)> {
        self.spec.qk_norm.zip(self.norms.as_ref().map(|norms| &norms[part]))
    }

    /// Statistics of its queries, where there are some, for sequences with these frequencies of all rotations of the model.
    pub(super) fn query_statistics(&self, frequencies: &[Frequencies]) -> Option<QueryStatistics> {
        let statistics = self.query_statistics.as_ref()?.each_ref();
        Some(QueryStatistics::new(statistics, self.rotation.map(|of| frequencies[of].clone())))
    }

    /// Queries before they are turned to their positions: `(B, n, E)` in, `(B, H, n, D)` out.
    fn unturned_queries(&self, x_bne: &Tensor, tokens: &TokenContext<'_>) -> Tensor {
        let q_bni = self.inputs[0].forward(x_bne, tokens).narrow(-1, 0, self.spec.widths()[0] as i64);
        self.heads(&q_bni, self.norm_of(0))
    }

    /// Queries, keys and values as the linears make them: `(B, n, E)` in, thrice `(B, n, heads · D)` out.
    fn inputs(&self, x_bne: &Tensor, tokens: &TokenContext<'_>) -> [Tensor; 3] {
        if let [query, key, value] = &self.inputs[..] {
            return [query, key, value].map(|linear| linear.forward(x_bne, tokens));
        }
        let (all, [queries, keys, values]) =
            (self.inputs[0].forward(x_bne, tokens), self.spec.widths().map(|width| width as i64));
        [(0, queries), (queries, keys), (queries + keys, values)].map(|(start, width)| all.narrow(-1, start, width))
    }

    /// Queries with the factor of their positions: `(B, H, n, D)` in and out.
    fn grown(&self, q_bhnd: Tensor, tokens: &TokenContext<'_>) -> Tensor {
        let Some(QueryGrowth { beta, original }) = self.spec.query_growth else { return q_bhnd };
        let step_bn = tokens.position_bn.atleast_2d().floor_divide_scalar(original as i64);
        let factor_bn = (step_bn + 1).to_kind(accumulation_kind(q_bhnd.kind())).log() * beta + 1.0;
        // (B, n) -> (B, 1, n, 1).
        &q_bhnd * factor_bn.to_kind(q_bhnd.kind()).unsqueeze(1).unsqueeze(-1)
    }

    /// Asks whoever remembers the past. `x_bne` is what queries, keys and values are made of, for a gate. `(B, n, E)`, and as in [`Qkv`];
    /// `(B, H, n, D)` out.
    pub(super) fn attend(
        &self,
        x_bne: Option<&Tensor>,
        [q_bhnd, k_bgnd, v_bgnd]: [&Tensor; 3],
        attend: &mut dyn Attend,
    ) -> Result<Tensor, Fault> {
        let sink_logit_h = self.sinks.as_ref().map(CopyableVector::current);
        let mut qkv = Qkv { sink_logit_h, ..Qkv::new(q_bhnd, k_bgnd, v_bgnd, self.spec.rule) };
        match attend.model_feature(self.layer) {
            Some(ModelFeature::Gate) => {
                let (gate, x_bne) = self.gate.as_ref().zip(x_bne).ok_or_else(Gates::missing)?;
                // What the gate learns does not reach the model.
                qkv.own.further.push(gate.score(&x_bne.detach()));
            }
            Some(ModelFeature::OutputNorm) => qkv.own.further.push(no_grad(|| self.output_norm(v_bgnd))),
            None => {}
        }
        if let Some(x_bne) = x_bne {
            let context = TokenContext { position_bn: &Tensor::new(), dropout: &DropoutContext::default() };
            attend.see_input(self.layer, x_bne, &|| self.unturned_queries(x_bne, &context));
        }
        attend.attend(self.layer, qkv)
    }

    /// What the values come to behind the output projection: `‖v W_O‖₁`, the mean over the query heads of a KV head. `(B, G, n, D)` in,
    /// `(B, G, n, 1)` out.
    fn output_norm(&self, v_bgnd: &Tensor) -> Tensor {
        let (groups, head_dim, kind) = (v_bgnd.size()[1], v_bgnd.size()[3], accumulation_kind(v_bgnd.kind()));
        let (weight_oi, factor_o) = (self.output.weight(), self.output.row_factor());
        let per_group = weight_oi.size()[1] / head_dim / groups;
        // Head by head: a product is as large as the hidden states.
        let of_head = |group: i64, head: i64| {
            let start = (group * per_group + head) * head_dim;
            let product = self.output.forward_part(&v_bgnd.select(1, group), start, &weight_oi, factor_o.as_ref());
            product.abs().sum_dim_intlist(&[-1i64][..], true, kind)
        };
        let of_group = |group: i64| (0..per_group).map(|head| of_head(group, head)).sum::<Tensor>() / per_group as f64;
        Tensor::stack(&(0..groups).map(of_group).collect::<Vec<_>>(), 1)
    }

    /// From the heads back to the residual stream: `(B, H, n, D)` in, `(B, n, E)` out.
    pub(super) fn output(&self, attended_bhnd: &Tensor, tokens: &TokenContext<'_>) -> Tensor {
        self.output.forward(&attended_bhnd.transpose(1, 2).flatten(2, 3), tokens)
    }

    /// `(B, n, heads · D)` to `(B, heads, n, D)`.
    fn heads(&self, x_bni: &Tensor, norm: Option<(QkNorm, &RmsNorm)>) -> Tensor {
        let size = x_bni.size();
        let apart = |x_bni: &Tensor| x_bni.view([size[0], size[1], -1, self.spec.head_dim as i64]);
        let x_bnhd = match norm {
            None => apart(x_bni),
            Some((QkNorm::PerHead, norm)) => norm.apply(&apart(x_bni)),
            Some((QkNorm::FullWidth, norm)) => apart(&norm.apply(x_bni)),
        };
        x_bnhd.transpose(1, 2)
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let norms = self.norms.iter().flatten().map(RmsNorm::tensor);
        self.linears().flat_map(Linear::tensors).chain(norms).chain(self.sinks.as_ref().map(|vector| &vector.own))
    }

    /// The weights of its norms, its sinks and the biases of its linears, to be changed.
    pub(super) fn copyable_mut(&mut self) -> impl Iterator<Item = &mut CopyableVector> {
        let norms = self.norms.iter_mut().flatten().map(|norm| &mut norm.weight_e);
        let biases = self.inputs.iter_mut().chain([&mut self.output]).filter_map(|linear| linear.bias_o.as_mut());
        norms.chain(&mut self.sinks).chain(biases)
    }

    /// In the order of [`super::AttentionSpec::linears`].
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.inputs.iter().chain([&self.output])
    }

    pub(super) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.inputs.iter_mut().chain([&mut self.output])
    }
}
