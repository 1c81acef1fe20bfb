//! What a chunk sees: its own keys and values, and the pages of slots beside them; and what a policy may ask of its attention.

use tch::Tensor;

use crate::cache::{ChunkAttention, Placement, Queries};
use crate::ops::attention::{Attended, Chunk, KvPage, Qkv, ScoreRule, attention_mass};

/// What a chunk's backward needs, and nothing of the size of the cache.
#[derive(Debug)]
pub(super) struct ChunkSaved {
    pub(super) own: OwnKeys,
    pub(super) attended: Attended,
    pub(super) placement: Placement,
}

/// A chunk by the columns of its region: queries, keys, values, and which of the keys the queries see.
#[derive(Debug)]
pub(super) struct OwnKeys {
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    pub(super) rule: ScoreRule,
    /// The drains of the query heads, in a layer that has them.
    pub(super) drain_h: Option<Tensor>,
    /// Which of the region's columns hold an entry `(B, G, n)`, where sequences end in the chunk and heads have empty slots.
    pub(super) in_use_bgn: Option<Tensor>,
    /// How many of the region's columns, from the first on, see each of them `(B, G, n)`, where the layer has a window.
    pub(super) seen_until_bgn: Option<Tensor>,
}

impl OwnKeys {
    /// With a past that stands in the cache as it did when the chunk attended.
    pub(super) fn beside<'a>(&'a self, past: &'a PastPages) -> Chunk<'a> {
        Chunk {
            qkv: Qkv { q_bhnd: &self.q, k_bgnd: &self.k, v_bgnd: &self.v, rule: self.rule, drain_h: self.drain_h.as_ref() },
            in_use_bgn: self.in_use_bgn.as_ref(),
            seen_until_bgn: self.seen_until_bgn.as_ref(),
            joined_bgcd: past.joined(),
        }
    }
}

/// What a chunk sees in addition to itself.
pub(super) struct PastPages {
    pub(super) pages: Vec<PastPage>,
    /// With the chunk that stands behind it, where both are what attention sees and lie side by side.
    pub(super) joined: Option<(Tensor, Tensor)>,
}

pub(super) struct PastPage {
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    /// Which of them are in use, where heads have shares of different size.
    pub(super) in_use_bgp: Option<Tensor>,
    /// How many of the chunk's columns see each slot, where the layer has a window.
    pub(super) seen_until_bgp: Option<Tensor>,
}

impl PastPage {
    fn part(&self) -> KvPage<'_> {
        let (in_use_bgp, seen_until_bgp) = (self.in_use_bgp.as_ref(), self.seen_until_bgp.as_ref());
        KvPage { in_use_bgp, seen_until_bgp, ..KvPage::of(&self.k, &self.v) }
    }
}

impl PastPages {
    fn joined(&self) -> Option<(&Tensor, &Tensor)> {
        self.joined.as_ref().map(|(k, v)| (k, v))
    }

    pub(super) fn parts(&self) -> Vec<KvPage<'_>> {
        self.pages.iter().map(PastPage::part).collect()
    }
}

/// The attention of a chunk that has just attended, for the policy to ask about.
pub(super) struct AttendedChunk<'a> {
    pub(super) saved: &'a ChunkSaved,
    pub(super) past: &'a PastPages,
    /// What was summed while the chunk attended.
    pub(super) mass: Option<(Queries, Tensor)>,
}

impl ChunkAttention for AttendedChunk<'_> {
    fn mass(&self, queries: Queries) -> Tensor {
        if let Some((summed, mass)) = &self.mass
            && *summed == queries
        {
            return mass.shallow_clone();
        }
        let lse = self.saved.placement.silence(&self.saved.attended.lse_bhn);
        attention_mass(self.saved.own.beside(self.past), &self.past.parts(), &lse, queries)
    }

    fn queries(&self) -> (Tensor, f64) {
        (self.saved.own.q.shallow_clone(), self.saved.own.rule.scale)
    }

    fn entries(&self) -> (Tensor, Tensor) {
        let all =
            |of: fn(&PastPage) -> &Tensor, own| Tensor::cat(&self.past.pages.iter().map(of).chain([own]).collect::<Vec<_>>(), 2);
        (all(|page| &page.k, &self.saved.own.k), all(|page| &page.v, &self.saved.own.v))
    }
}
