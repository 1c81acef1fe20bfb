//! What the layers of a model are: data, from which the one decoder layer is built. A family reads it from its `config.json`.

pub(super) use crate::ops::attention::ScoreRule;

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// Its attention.
    pub attention: AttentionSpec,
    /// What follows its attention.
    pub feed_forward: FeedForwardSpec,
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
    /// How queries and keys are rotated.
    pub rope: RopeSpec,
    /// Each head of queries and keys is normalised before it is rotated.
    pub has_qk_norm: bool,
    /// Queries, keys and values have a bias.
    pub has_qkv_bias: bool,
}

/// A rotary position embedding (Su et al. 2021, arXiv 2104.09864).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeSpec {
    /// The base of the frequencies.
    pub theta: f64,
}

/// The part of a layer that acts on each token alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FeedForwardSpec {
    /// A gated MLP with SiLU.
    Dense {
        /// Its width.
        intermediate_size: usize,
    },
}

impl FeedForwardSpec {
    /// The width of the layer between its projections.
    pub fn intermediate_size(&self) -> usize {
        let Self::Dense { intermediate_size } = self;
        *intermediate_size
    }
}
