//! One decoder layer: attention, and an MLP or experts, each on a normalised input, each added to the residual stream.

use tch::Tensor;

use super::ModelError;
use super::attend::{Attend, AttendError};
use super::attention::Attention;
use super::config::ModelConfig;
use super::delta::Delta;
use super::dropout::TokenContext;
use super::experts::Experts;
use super::linear::Linear;
use super::mlp::Mlp;
use super::names::layer_tensor;
use super::spec::{FeedForwardSpec, gated_linears};
use super::weights::Weights;
use crate::ops::rms_norm::rms_norm;
use crate::ops::rope::Rotation;
use crate::units::LayerIdx;

#[derive(Debug)]
pub(super) struct DecoderLayer {
    idx: LayerIdx,
    attention_norm_e: Tensor,
    attention: Attention,
    mlp_norm_e: Tensor,
    feed_forward: FeedForward,
    eps: f64,
}

#[derive(Debug)]
enum FeedForward {
    Dense(Mlp),
    Experts(Experts),
}

impl FeedForward {
    fn load(weights: &Weights, config: &ModelConfig, layer: LayerIdx) -> Result<Self, ModelError> {
        let hidden = config.hidden_size;
        Ok(match &config.layers[layer.0].feed_forward {
            FeedForwardSpec::Dense { intermediate_size, has_bias } => {
                Self::Dense(Mlp::load(weights, layer, gated_linears(*intermediate_size, hidden, *has_bias))?)
            }
            FeedForwardSpec::Experts(spec) => Self::Experts(Experts::load(weights, layer, spec, hidden)?),
        })
    }

    fn linears(&self) -> Vec<&Linear> {
        match self {
            Self::Dense(mlp) => mlp.linears().into(),
            Self::Experts(experts) => experts.linears().collect(),
        }
    }
}

impl DecoderLayer {
    pub(super) fn load(weights: &Weights, config: &ModelConfig, layer: LayerIdx) -> Result<Self, ModelError> {
        let norm = |name: &str| weights.load(&layer_tensor(layer.0, name));
        Ok(Self {
            attention_norm_e: norm("input_layernorm.weight")?,
            attention: Attention::load(weights, config, layer)?,
            mlp_norm_e: norm("post_attention_layernorm.weight")?,
            feed_forward: FeedForward::load(weights, config, layer)?,
            idx: layer,
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
        self.after_attention(hidden_bne, attended_bhnd, tokens, attend)
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
    pub(super) fn after_attention(
        &self,
        hidden_bne: &Tensor,
        attended_bhnd: Tensor,
        tokens: &TokenContext<'_>,
        attend: &mut dyn Attend,
    ) -> Result<Tensor, AttendError> {
        let hidden_bne = hidden_bne + self.attention.output(&attended_bhnd, tokens);
        drop(attended_bhnd);
        let normed_bne = rms_norm(&hidden_bne, &self.mlp_norm_e, self.eps);
        let added_bne = match &self.feed_forward {
            FeedForward::Dense(mlp) => mlp.forward(&normed_bne, tokens),
            FeedForward::Experts(experts) => experts.forward(self.idx, &normed_bne, tokens, attend)?,
        };
        Ok(hidden_bne + added_bne)
    }

    /// Asks whoever remembers the past.
    pub(super) fn attend(&self, qkv: [&Tensor; 3], attend: &mut dyn Attend) -> Result<Tensor, AttendError> {
        self.attention.attend(qkv, attend)
    }

    /// The tensors of the model itself.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let of_feed_forward = self.feed_forward.linears().into_iter().flat_map(Linear::tensors);
        [&self.attention_norm_e, &self.mlp_norm_e].into_iter().chain(self.attention.tensors()).chain(of_feed_forward)
    }

    /// Whether a router decides which of its matrices a token meets.
    pub(super) fn has_experts(&self) -> bool {
        matches!(self.feed_forward, FeedForward::Experts(_))
    }

    /// What is trained beside its linears, by the names of these.
    pub(super) fn deltas(&self) -> Vec<(&str, &Delta)> {
        let stacked = if let FeedForward::Experts(experts) = &self.feed_forward { &experts.stacked()[..] } else { &[] };
        let of_linears = self.linears().filter_map(|linear| Some((linear.name.as_str(), linear.delta.as_ref()?)));
        of_linears.chain(stacked.iter().filter_map(|all| Some((all.name.as_str(), all.delta.as_ref()?)))).collect()
    }

    /// Its linears, those of experts among them.
    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.attention.linears().into_iter().chain(self.feed_forward.linears())
    }

    /// Places for what is trained beside its linears, by the names of these, in the order of [`Self::deltas`].
    pub(super) fn delta_places(&mut self) -> Vec<(&str, &mut Option<Delta>)> {
        let mut places: Vec<(&str, &mut Option<Delta>)> = Vec::new();
        places.extend(self.attention.linears_mut().into_iter().map(|linear| (linear.name.as_str(), &mut linear.delta)));
        match &mut self.feed_forward {
            FeedForward::Dense(mlp) => places.extend(mlp.linears_mut().map(|linear| (linear.name.as_str(), &mut linear.delta))),
            FeedForward::Experts(experts) => {
                let (linears, stacked) = experts.linears_mut();
                places.extend(linears.map(|linear| (linear.name.as_str(), &mut linear.delta)));
                places.extend(stacked.iter_mut().map(|all| (all.name.as_str(), &mut all.delta)));
            }
        }
        places
    }
}
