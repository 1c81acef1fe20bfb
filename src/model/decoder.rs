//! One decoder layer: attention, and an MLP or experts, each normalised before or behind it or both, each added to the residual stream.

use tch::Tensor;

use super::attend::Attend;
use super::attention::Attention;
use super::config::ModelConfig;
use super::feed_forward::{Experts, Mlp};
use super::linear::{Linear, LoraDelta};
use super::names::layer_tensor;
use super::positions::TokenContext;
use super::spec::{FeedForwardSpec, LayerNorms};
use super::vectors::{CopyableVector, RmsNorm, scaled};
use super::weights::Weights;
use crate::ops::rope::Rotation;
use crate::units::{Fault, LayerIdx};

#[derive(Debug)]
pub(super) struct DecoderLayer {
    idx: LayerIdx,
    pub(super) attention: Attention,
    feed_forward: FeedForward,
    norms: LayerNorms<RmsNorm>,
    residual_scale: f64,
}

/// What a norm makes of a tensor, where there is one.
fn normed(norm: Option<&RmsNorm>, x_bne: &Tensor) -> Tensor {
    norm.map_or_else(|| x_bne.shallow_clone(), |norm| norm.apply(x_bne))
}

#[derive(Debug)]
enum FeedForward {
    Dense(Box<Mlp>),
    Experts(Box<Experts>),
}

impl FeedForward {
    fn load(weights: &Weights, config: &ModelConfig, layer: LayerIdx) -> Result<Self, Fault> {
        let (hidden, spec) = (config.hidden_size, &config.layers[layer.0].feed_forward);
        Ok(match spec {
            FeedForwardSpec::Dense { activation, .. } => {
                Self::Dense(Box::new(Mlp::load(weights, layer, &spec.linears(hidden), *activation)?))
            }
            FeedForwardSpec::Experts(spec) => Self::Experts(Box::new(Experts::load(weights, layer, spec, hidden)?)),
        })
    }

    fn linears(&self) -> Vec<&Linear> {
        match self {
            Self::Dense(mlp) => mlp.linears().collect(),
            Self::Experts(experts) => experts.linears().collect(),
        }
    }

    fn linears_mut(&mut self) -> Vec<&mut Linear> {
        match self {
            Self::Dense(mlp) => mlp.linears_mut().collect(),
            Self::Experts(experts) => experts.linears_mut().collect(),
        }
    }
}

impl DecoderLayer {
    pub(super) fn load(weights: &Weights, config: &ModelConfig, layer: LayerIdx) -> Result<Self, Fault> {
        let spec = &config.layers[layer.0];
        let norm = |path: Option<&str>| {
            let load = |path| RmsNorm::load(weights, config, &layer_tensor(layer.0, &format!("{path}.weight")));
            path.map(load).transpose()
        };
        Ok(Self {
            attention: Attention::load(weights, config, layer)?,
            feed_forward: FeedForward::load(weights, config, layer)?,
            norms: LayerNorms {
                before_attention: norm(spec.norms.before_attention)?,
                behind_attention: norm(spec.norms.behind_attention)?,
                before_feed_forward: norm(spec.norms.before_feed_forward)?,
                behind_feed_forward: norm(spec.norms.behind_feed_forward)?,
            },
            residual_scale: spec.residual_scale,
            idx: layer,
        })
    }

    /// `(B, n, E)` in and out.
    pub(super) fn forward(
        &self,
        hidden_bne: &Tensor,
        rotations: &[Rotation],
        tokens: &TokenContext<'_>,
        attend: &mut dyn Attend,
    ) -> Result<Tensor, Fault> {
        let x_bne = self.attention_input(hidden_bne);
        let [q_bhnd, k_bgnd, v_bgnd] = self.attention.project(&x_bne, rotations, tokens);
        let attended_bhnd = self.attention.attend(Some(&x_bne), [&q_bhnd, &k_bgnd, &v_bgnd], attend)?;
        drop([x_bne, q_bhnd, k_bgnd, v_bgnd]);
        if !attend.wants_output(self.idx) {
            return Ok(hidden_bne.shallow_clone());
        }
        self.after_attention(hidden_bne, attended_bhnd, tokens, attend)
    }

    /// What queries, keys and values are made of: `(B, n, E)` in and out.
    pub(super) fn attention_input(&self, hidden_bne: &Tensor) -> Tensor {
        normed(self.norms.before_attention.as_ref(), hidden_bne)
    }

    /// What follows attention: the layer's output. What was attended is gone, but for what autograd keeps, before the MLP. The layer's input
    /// `(B, n, E)` and what was attended `(B, H, n, D)` in, `(B, n, E)` out.
    pub(super) fn after_attention(
        &self,
        hidden_bne: &Tensor,
        attended_bhnd: Tensor,
        tokens: &TokenContext<'_>,
        attend: &mut dyn Attend,
    ) -> Result<Tensor, Fault> {
        let made_bne = self.attention.output(&attended_bhnd, tokens);
        let hidden_bne = self.added(hidden_bne, normed(self.norms.behind_attention.as_ref(), &made_bne));
        drop(made_bne);
        drop(attended_bhnd);
        let normed_bne = normed(self.norms.before_feed_forward.as_ref(), &hidden_bne);
        let added_bne = match &self.feed_forward {
            FeedForward::Dense(mlp) => mlp.forward(&normed_bne, tokens),
            FeedForward::Experts(experts) => experts.forward(self.idx, &normed_bne, tokens, attend)?,
        };
        Ok(self.added(&hidden_bne, normed(self.norms.behind_feed_forward.as_ref(), &added_bne)))
    }

    /// The residual stream with what a branch has made.
    fn added(&self, hidden_bne: &Tensor, made_bne: Tensor) -> Tensor {
        hidden_bne + scaled(made_bne, self.residual_scale)
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let of_feed_forward = self.feed_forward.linears().into_iter().flat_map(Linear::tensors);
        let norms = self.norms.iter().map(RmsNorm::tensor);
        let further = if let FeedForward::Experts(experts) = &self.feed_forward { Some(experts.further_tensors()) } else { None };
        norms.chain(self.attention.tensors()).chain(of_feed_forward).chain(further.into_iter().flatten())
    }

    /// The weights of its norms, its sinks and the biases of its linears, to be changed.
    pub(super) fn copyable_mut(&mut self) -> impl Iterator<Item = &mut CopyableVector> {
        let LayerNorms { before_attention, behind_attention, before_feed_forward, behind_feed_forward } = &mut self.norms;
        let norms = [before_attention, behind_attention, before_feed_forward, behind_feed_forward].into_iter().flatten();
        let norms = norms.map(|norm| &mut norm.weight_e);
        let biases = self.feed_forward.linears_mut().into_iter().filter_map(|linear| linear.bias_o.as_mut());
        norms.chain(self.attention.copyable_mut()).chain(biases)
    }

    /// Whether a router decides which of its matrices a token meets.
    pub(super) fn has_experts(&self) -> bool {
        matches!(self.feed_forward, FeedForward::Experts(_))
    }

    /// What is trained beside its linears, by the names of these.
    pub(super) fn deltas(&self) -> Vec<(&str, &LoraDelta)> {
        let stacked = if let FeedForward::Experts(experts) = &self.feed_forward { &experts.stacked[..] } else { &[] };
        let of_linears = self.linears().filter_map(|linear| Some((linear.name.as_str(), linear.delta.as_ref()?)));
        of_linears.chain(stacked.iter().filter_map(|(name, delta)| Some((name.as_str(), delta.as_ref()?)))).collect()
    }

    /// All linears, those of experts among them.
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.attention.linears().chain(self.feed_forward.linears())
    }

    pub(super) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.attention.linears_mut().chain(self.feed_forward.linears_mut())
    }

    /// What is trained beside the linears of all experts, side by side, by the names of these.
    pub(super) fn stacked_mut(&mut self) -> impl Iterator<Item = &mut (String, Option<LoraDelta>)> {
        let experts = if let FeedForward::Experts(experts) = &mut self.feed_forward { Some(experts) } else { None };
        experts.into_iter().flat_map(|experts| &mut experts.stacked)
    }
}
