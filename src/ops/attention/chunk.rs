//! A chunk as attention sees it: its queries, the keys and values that they see, and what comes of them.

use tch::{Kind, Tensor};

use super::rule::ScoreRule;
/// Slots below the chunk's region, or a page of them: older than every query of the chunk.
pub use crate::native::KvPart as KvPage;

/// An attention output and the log-sum-exp of the scores behind it.
#[derive(Debug)]
pub struct Attended {
    /// `(B, H, n, D)`, in the dtype of the queries.
    pub out_bhnd: Tensor,
    /// `(B, H, n)`, f32 (f64 for f64 inputs).
    pub lse_bhn: Tensor,
}

/// The gradients of one chunk's attention.
#[derive(Debug)]
pub struct AttentionGrads {
    /// `(B, H, n, D)`.
    pub dq_bhnd: Tensor,
    /// Of the chunk's own keys `(B, G, n, D)`.
    pub dk_bgnd: Tensor,
    /// Of the chunk's own values `(B, G, n, D)`.
    pub dv_bgnd: Tensor,
    /// Of the past's keys and values `(B, G, P, D)`, part by part.
    pub past: Vec<(Tensor, Tensor)>,
}

/// Queries, keys and values of new tokens, rotated to their positions, and how their scores come about.
#[derive(Clone, Copy, Debug)]
pub struct Qkv<'a> {
    /// Queries `(B, H, n, D)`; query head `h` belongs to KV head `h / (H / G)`.
    pub q_bhnd: &'a Tensor,
    /// Keys `(B, G, n, D)`.
    pub k_bgnd: &'a Tensor,
    /// Values `(B, G, n, D)`.
    pub v_bgnd: &'a Tensor,
    pub rule: ScoreRule,
    /// The drain of each query head `(H)`: one more score, that no key has; its weight goes nowhere.
    pub drain_h: Option<&'a Tensor>,
}

/// A chunk's queries, keys and values, and which of its own keys its queries see.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    pub qkv: Qkv<'a>,
    /// Which of the keys count `(B, G, n)`, bool, where not all of them do.
    pub in_use_bgn: Option<&'a Tensor>,
    /// As [`KvPage::seen_until_bgp`], of its own keys `(B, G, n)`.
    pub seen_until_bgn: Option<&'a Tensor>,
    /// Keys and values of past and chunk side by side `(B, G, P + n, D)`, where they lie so: some kernels see them all at once.
    pub joined_bgcd: Option<(&'a Tensor, &'a Tensor)>,
}

/// Some queries of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queries {
    All,
    /// So many of the last, or all where there are fewer.
    Last(usize),
}

impl Queries {
    /// The first of them among `tokens`.
    pub(super) fn first(self, tokens: i64) -> i64 {
        match self {
            Self::All => 0,
            Self::Last(count) => (tokens - count as i64).max(0),
        }
    }
}

impl<'a> Chunk<'a> {
    /// A chunk all of whose keys count, and which lie apart from those of the past.
    ///
    /// # Shapes
    /// As of its fields.
    pub fn of(q_bhnd: &'a Tensor, (k_bgnd, v_bgnd): (&'a Tensor, &'a Tensor), rule: ScoreRule) -> Self {
        let qkv = Qkv { q_bhnd, k_bgnd, v_bgnd, rule, drain_h: None };
        Self { qkv, in_use_bgn: None, seen_until_bgn: None, joined_bgcd: None }
    }

    /// What its queries see of its own keys.
    pub(super) fn mask(&self) -> Mask<'a> {
        Mask { is_causal: true, ..mask_of(&self.own()) }
    }

    /// Its own keys and values.
    pub(super) fn own(&self) -> KvPage<'a> {
        let Qkv { k_bgnd, v_bgnd, .. } = self.qkv;
        KvPage { k_bgpd: k_bgnd, v_bgpd: v_bgnd, in_use_bgp: self.in_use_bgn, seen_until_bgp: self.seen_until_bgn }
    }

    /// Query heads of a KV head.
    pub(super) fn per_group(&self) -> f64 {
        (self.qkv.q_bhnd.size()[1] / self.num_kv_heads()) as f64
    }

    pub(super) fn num_kv_heads(&self) -> i64 {
        self.qkv.k_bgnd.size()[1]
    }
}

/// Which keys the queries of a part see.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Mask<'a> {
    /// Those up to their own.
    pub(super) is_causal: bool,
    /// Those of slots in use, `(B, G, P)` bool.
    pub(super) in_use_bgp: Option<&'a Tensor>,
    /// So many of the queries, from the first on, see each key, `(B, G, P)` int64.
    pub(super) seen_until_bgp: Option<&'a Tensor>,
}

/// What the chunk's queries see of a part of the past.
pub(super) fn mask_of<'a>(past: &KvPage<'a>) -> Mask<'a> {
    Mask { is_causal: false, in_use_bgp: past.in_use_bgp, seen_until_bgp: past.seen_until_bgp }
}

/// A sum over many tokens of tensors like `x`, of none so far.
///
/// # Shapes
/// Those of `x`.
pub fn zero_sum_of(x: &Tensor) -> Tensor {
    Tensor::zeros(x.size(), (accumulation_kind(x.kind()), x.device()))
}

/// The kind in which sums over many tokens are kept: f64 for f64, else f32.
pub fn accumulation_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}
