//! `tova`: what the last query looks at stays, the mean over all heads of the layer deciding for all of them (Oren et al. 2024, arXiv
//! 2401.06104). Departs from the paper in that the last query of a chunk (or of the prefill span) decides, not every single one.

use tch::{Kind, Tensor};

use super::params::grace_period;
use crate::cache::{CacheError, Entries, EvictionOrder, Observed, Policy, Queries, Scope};
use crate::recipe::PolicyRecipe;

#[derive(Debug)]
struct Tova {
    grace: usize,
}

pub(super) fn build(choice: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, CacheError> {
    Ok(Box::new(Tova { grace: grace_period(choice, cache_length)? }))
}

impl Policy for Tova {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        // All heads have noted the same.
        entries
            .observed_bgc
            .map_or(EvictionOrder::ByPosition { keep_first: 0 }, |score| EvictionOrder::ByEntry(score.narrow(1, 0, 1)))
    }

    fn grace(&self) -> usize {
        self.grace
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        let mass = seen.attention.mass(Queries::Last(1));
        let size = mass.size();
        Some(mass.mean_dim(&[1i64][..], true, Kind::Float).expand(&size[..], false))
    }

    fn required_queries(&self, _is_prefill: bool) -> Option<Queries> {
        Some(Queries::Last(1))
    }

    fn scope(&self) -> Scope {
        Scope::Sequence
    }
}
