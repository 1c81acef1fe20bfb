//! What the layers of a model are: data, from which the one decoder layer is built. A family reads it from its `config.json`.

use std::borrow::Cow;

pub(super) use crate::ops::attention::ScoreRule;
pub use crate::ops::frequencies::{Llama3Scaling, LongRopeScaling, RopeScaling, RopeSpec, YarnScaling};

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// Its attention.
    pub attention: AttentionSpec,
    /// What follows its attention.
    pub feed_forward: FeedForwardSpec,
}

/// A linear of a layer. Whoever speaks of one names its path: which ones a layer has is for its specs alone to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearSpec {
    /// Inside the layer: `self_attn.q_proj`.
    pub path: Cow<'static, str>,
    /// Channels that come out.
    pub out: usize,
    /// Channels that go in.
    pub inner: usize,
    /// Whether a bias is added.
    pub has_bias: bool,
}

impl LinearSpec {
    fn new(path: &'static str, [out, inner]: [usize; 2], has_bias: bool) -> Self {
        Self { path: path.into(), out, inner, has_bias }
    }

    /// The last part of its path, by which PEFT and recipes target it: `q_proj`.
    pub fn name(&self) -> &str {
        self.path.rsplit_once('.').map_or(&self.path, |(_, name)| name)
    }
}

impl LayerSpec {
    /// All linears of the layer, on a residual stream of width `hidden`, in the order in which they are computed. A linear's place in it is
    /// its number in the masks of dropout.
    pub fn linears(&self, hidden: usize) -> Vec<LinearSpec> {
        self.attention.linears(hidden).into_iter().chain(self.feed_forward.linears(hidden)).collect()
    }
}

/// The attention of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// H, query heads.
    pub num_heads: usize,
    /// G, heads of keys and values; divides H.
    pub num_kv_heads: usize,
    /// D, even.
    pub head_dim: usize,
    /// Scale and window of the scores.
    pub rule: ScoreRule,
    /// How queries and keys are rotated; `None` where they know no position.
    pub rope: Option<RopeSpec>,
    /// Each head of queries and keys is normalised before it is rotated.
    pub has_qk_norm: bool,
    /// Queries, keys and values have a bias.
    pub has_qkv_bias: bool,
    /// What comes back from the heads has a bias.
    pub has_output_bias: bool,
}

impl AttentionSpec {
    /// Those to queries, keys and values, and that from the heads back to the residual stream.
    pub fn linears(&self, hidden: usize) -> [LinearSpec; 4] {
        let [queries, keys] = [self.num_heads, self.num_kv_heads].map(|heads| heads * self.head_dim);
        [
            LinearSpec::new("self_attn.q_proj", [queries, hidden], self.has_qkv_bias),
            LinearSpec::new("self_attn.k_proj", [keys, hidden], self.has_qkv_bias),
            LinearSpec::new("self_attn.v_proj", [keys, hidden], self.has_qkv_bias),
            LinearSpec::new("self_attn.o_proj", [hidden, queries], self.has_output_bias),
        ]
    }
}

/// The part of a layer that acts on each token alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FeedForwardSpec {
    /// A gated MLP with `SiLU`.
    Dense {
        /// Its width.
        intermediate_size: usize,
        /// Its projections have a bias.
        has_bias: bool,
    },
}

impl FeedForwardSpec {
    /// Its linears, in the order in which they are computed.
    pub fn linears(&self, hidden: usize) -> Vec<LinearSpec> {
        let Self::Dense { intermediate_size, has_bias } = self;
        gated_linears(*intermediate_size, hidden, *has_bias).into()
    }

    /// The width of the layer between its projections.
    pub fn intermediate_size(&self) -> usize {
        let Self::Dense { intermediate_size, .. } = self;
        *intermediate_size
    }
}

/// The linears of a gated MLP: gate, up, down.
pub(super) fn gated_linears(intermediate: usize, hidden: usize, has_bias: bool) -> [LinearSpec; 3] {
    [
        LinearSpec::new("mlp.gate_proj", [intermediate, hidden], has_bias),
        LinearSpec::new("mlp.up_proj", [intermediate, hidden], has_bias),
        LinearSpec::new("mlp.down_proj", [hidden, intermediate], has_bias),
    ]
}
