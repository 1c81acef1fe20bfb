//! A chunk as attention sees it: its queries, the keys and values that they see, and what comes of them.

use tch::Tensor;

use super::blocks::Mask;
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

/// The chunk's queries, keys and values, and the softmax scale.
#[derive(Debug, Clone, Copy)]
pub struct Chunk<'a> {
    /// Queries `(B, H, n, D)`; query head `h` belongs to KV head `h / (H / G)`.
    pub q_bhnd: &'a Tensor,
    /// Keys `(B, G, n, D)`.
    pub k_bgnd: &'a Tensor,
    /// Values `(B, G, n, D)`.
    pub v_bgnd: &'a Tensor,
    /// The factor on `q · k`.
    pub scale: f64,
    /// Which of the keys count `(B, G, n)`, bool, where not all of them do.
    pub in_use_bgn: Option<&'a Tensor>,
    /// Keys and values of past and chunk side by side `(B, G, P + n, D)`, where they lie so: some kernels see them all at once.
    pub joined_bgcd: Option<(&'a Tensor, &'a Tensor)>,
}

/// Some queries of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queries {
    /// All of them.
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
    pub fn of(q_bhnd: &'a Tensor, (k_bgnd, v_bgnd): (&'a Tensor, &'a Tensor), scale: f64) -> Self {
        Self { q_bhnd, k_bgnd, v_bgnd, scale, in_use_bgn: None, joined_bgcd: None }
    }

    /// What its queries see of its own keys.
    pub(super) fn sight(&self) -> Mask<'a> {
        self.in_use_bgn.map_or(Mask::Causal, Mask::CausalInUse)
    }

    /// Its own keys and values.
    pub(super) fn own(&self) -> KvPage<'a> {
        KvPage { k_bgpd: self.k_bgnd, v_bgpd: self.v_bgnd, in_use_bgp: self.in_use_bgn }
    }

    /// Query heads of a KV head.
    pub(super) fn per_group(&self) -> f64 {
        (self.q_bhnd.size()[1] / self.num_kv_heads()) as f64
    }

    pub(super) fn num_kv_heads(&self) -> i64 {
        self.k_bgnd.size()[1]
    }
}

/// What the chunk's queries see of a part of the past.
pub(super) fn sight_of<'a>(past: &KvPage<'a>) -> Mask<'a> {
    past.in_use_bgp.map_or(Mask::All, Mask::InUse)
}
