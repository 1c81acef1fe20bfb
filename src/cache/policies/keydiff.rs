//! `keydiff`: keys that resemble the others leave. The score is minus the cosine of a key with the mean of all directions (Park et al.
//! 2025, arXiv 2504.15364). Departs from the paper in that keys are compared after the rotation to their positions, as they are kept.

use tch::Kind;

use super::params::grace_period;
use crate::cache::{CacheError, Entries, EvictionOrder, Policy, PolicyTraits};
use crate::ops::attention::accumulation_kind;
use crate::recipe::PolicyRecipe;

#[derive(Debug)]
struct Keydiff {
    grace: usize,
}

pub(super) fn build(choice: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, CacheError> {
    Ok(Box::new(Keydiff { grace: grace_period(choice, cache_length)? }))
}

/// Below every norm that matters.
const TINY: f64 = 1e-12;

impl Policy for Keydiff {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        let keys = entries.keys();
        // In bf16 most cosines near 1 would be the same.
        let keys = keys.to_kind(accumulation_kind(keys.kind()));
        let norm_bgc1 = keys.norm_scalaropt_dim(2.0, [-1i64], true).clamp_min(TINY);
        // The sum of the directions k/|k|, as a product: the directions themselves are never written down.
        // What stands in a slot that is not in use has no say.
        let weight_bgc1 = norm_bgc1.reciprocal().masked_fill(&entries.position_bgc.lt(0).unsqueeze(-1), 0.0);
        let anchor_bg1d = weight_bgc1.transpose(-1, -2).matmul(&keys);
        let length = anchor_bg1d.norm_scalaropt_dim(2.0, [-1i64], true).clamp_min(TINY);
        let cosine = keys.matmul(&(anchor_bg1d / length).transpose(-1, -2)) / norm_bgc1;
        EvictionOrder::ByEntry(cosine.squeeze_dim(-1).neg().to_kind(Kind::Float))
    }

    fn traits(&self) -> PolicyTraits<'_> {
        PolicyTraits { grace: self.grace, compares_heads: true, ..PolicyTraits::default() }
    }
}
