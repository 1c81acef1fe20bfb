//! `tova`: what the last query looks at stays, the mean over all heads of the layer deciding for all of them (Oren et al. 2024, arXiv
//! 2401.06104). Departs from the paper in that the last query of a chunk (or of the prefill span) decides, not every single one.

use tch::{Kind, Tensor};

use super::params::grace_period;
use crate::cache::{Entries, EvictionOrder, Observed, Policy, PolicyTraits, Queries, Scope};
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug)]
struct Tova {
    grace: usize,
}

pub(super) fn build(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    Ok(Box::new(Tova { grace: grace_period(recipe, cache_length)? }))
}

const LAST: Queries = Queries::Last(1);

impl Policy for Tova {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        // All heads have noted the same.
        EvictionOrder::by_score(entries.observed_bgc.map(|score| score.narrow(1, 0, 1)))
    }

    fn traits(&self) -> PolicyTraits<'_> {
        PolicyTraits {
            grace: self.grace,
            prefill_queries: Some(LAST),
            chunk_queries: Some(LAST),
            scope: Scope::Sequence,
            ..PolicyTraits::default()
        }
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        let mass = seen.attention.mass(LAST);
        let size = mass.size();
        Some(mass.mean_dim(&[1i64][..], true, Kind::Float).expand(&size[..], false))
    }
}
