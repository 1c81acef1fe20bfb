//! `knorm`: keys of small norm stay, as they tend to attract attention (Devoto et al. 2024, arXiv 2406.11430). Departs from the paper
//! in that no layer is spared.

use tch::Tensor;

use super::heavy_hitters::norm;
use super::params::grace_period;
use crate::cache::{Entries, EvictionOrder, NewEntries, Policy, PolicyTraits};
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug)]
struct Knorm {
    grace: usize,
}

pub(super) fn build(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    Ok(Box::new(Knorm { grace: grace_period(recipe, cache_length)? }))
}

impl Policy for Knorm {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        EvictionOrder::by_score(entries.feature(0).map(|norm| norm.neg()))
    }

    fn traits(&self) -> PolicyTraits<'_> {
        PolicyTraits { grace: self.grace, compares_heads: true, ..PolicyTraits::default() }
    }

    fn describe(&self, new: &NewEntries<'_>) -> Vec<Tensor> {
        vec![norm(new.k_bgnd)]
    }
}
