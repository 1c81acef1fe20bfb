//! `keydiff`: keys that resemble the others leave. The score is minus the cosine of a key with the mean of all directions (Park et al.
//! 2025, arXiv 2504.15364). Departs from the paper in that keys are compared after the rotation to their positions, as they are kept.

use tch::Kind;

use super::params::grace_period;
use crate::cache::{Entries, EvictionOrder, Policy, PolicyTraits};
use crate::ops::head_vectors::cosines_with_mean;
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug)]
struct Keydiff {
    grace: usize,
}

pub(super) fn build(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    Ok(Box::new(Keydiff { grace: grace_period(recipe, cache_length)? }))
}

impl Policy for Keydiff {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        let cosine_bgc = cosines_with_mean(&entries.keys(), entries.position_bgc);
        EvictionOrder::ByEntry(cosine_bgc.neg().to_kind(Kind::Float))
    }

    fn traits(&self) -> PolicyTraits<'_> {
        PolicyTraits { grace: self.grace, compares_heads: true, ..PolicyTraits::default() }
    }
}
