//! A chunk as attention sees it: its queries, the keys and values that they see, and what comes of them.

use tch::{Kind, Tensor};

pub use crate::native::{KvBlock, ScoreRule};

/// An attention output and the log-sum-exp of the scores behind it.
#[derive(Debug)]
pub struct Attended {
    /// Outputs `(B, H, n, D)`, in the dtype of the queries.
    pub out_bhnd: Tensor,
    /// Log-sum-exp of the scores `(B, H, n)`, f32 (f64 for f64 inputs).
    pub lse_bhn: Tensor,
}

/// The gradients of one chunk's attention.
#[derive(Debug)]
pub struct AttentionGrads {
    /// Gradient of the queries `(B, H, n, D)`.
    pub dq_bhnd: Tensor,
    /// Gradients of the chunk's own keys and values.
    pub own: KvBlock,
    /// Gradients of the past's keys and values, block by block.
    pub past: Vec<KvBlock>,
}

/// Queries, keys and values of new tokens, rotated to their positions, and how their scores come about. Clones share the tensors.
#[derive(Debug)]
pub struct Qkv {
    /// Queries `(B, H, n, D)`; query head `h` belongs to KV head `h / (H / G)`.
    pub q_bhnd: Tensor,
    /// The chunk's own keys and values, `n` of them: each is seen by the queries from its own token on.
    pub own: KvBlock,
    pub rule: ScoreRule,
    /// The sink logit of each query head `(H)`: one more score, that no key has; its weight goes nowhere.
    pub sink_logit_h: Option<Tensor>,
    /// Past and chunk side by side, `P + n` slots, where they lie so: some kernels see them all at once.
    pub joined: Option<KvBlock>,
}

impl Clone for Qkv {
    fn clone(&self) -> Self {
        Self {
            q_bhnd: self.q_bhnd.shallow_clone(),
            own: self.own.clone(),
            rule: self.rule,
            sink_logit_h: self.sink_logit_h.as_ref().map(Tensor::shallow_clone),
            joined: self.joined.clone(),
        }
    }
}

/// A number that the model says of each new entry, for a policy to go by: a further plane of the entry, `(B, G, n, 1)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelFeature {
    /// The score of the layer's gate.
    Gate,
    /// How long the value is behind the output projection: `‖v W_O‖₁`, the mean over the query heads of a KV head.
    OutputNorm,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queries {
    All,
    /// The last queries, or all if there are fewer.
    Last(usize),
}

impl Queries {
    pub(super) fn first(self, tokens: i64) -> i64 {
        match self {
            Self::All => 0,
            Self::Last(count) => (tokens - count as i64).max(0),
        }
    }
}

impl Qkv {
    /// A chunk all of whose keys count, and which lie apart from those of the past.
    pub fn new(q_bhnd: &Tensor, k: &Tensor, v: &Tensor, rule: ScoreRule) -> Self {
        Self { q_bhnd: q_bhnd.shallow_clone(), own: KvBlock::new(k, v), rule, sink_logit_h: None, joined: None }
    }

    pub fn num_tokens(&self) -> i64 {
        self.q_bhnd.size()[2]
    }

    /// Whether nothing is capped or left out: no kernel of libtorch does that.
    pub(super) fn is_plain(&self, past: &[KvBlock]) -> bool {
        self.rule.soft_cap.is_none() && !past.iter().chain([&self.own]).any(KvBlock::is_masked)
    }

    /// Query heads of a KV head.
    pub(super) fn per_group(&self) -> f64 {
        (self.q_bhnd.size()[1] / self.num_kv_heads()) as f64
    }

    pub(super) fn num_kv_heads(&self) -> i64 {
        self.own.k.size()[1]
    }
}

impl ScoreRule {
    /// Scaled scores, capped in place.
    pub(super) fn capped(self, mut scores: Tensor) -> Tensor {
        if let Some(cap) = self.soft_cap {
            scores = scores.g_div_scalar_(cap).tanh_().g_mul_scalar_(cap);
        }
        scores
    }
}

/// A sum over many tokens of tensors like `x`, of none so far.
pub fn zero_sum_of(x: &Tensor) -> Tensor {
    Tensor::zeros(x.size(), (accumulation_kind(x.kind()), x.device()))
}

/// The kind in which sums over many tokens are kept, and what an adapter trains: f64 for f64, else f32.
pub fn accumulation_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}
