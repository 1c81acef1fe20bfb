//! `dense`: keeps everything.

use serde::Deserialize;

use crate::cache::{Entries, EvictionOrder, Policy, PolicyTraits};
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Dense {}

pub(super) fn build(recipe: &PolicyRecipe, _cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    Ok(Box::new(recipe.params::<Dense>()?))
}

impl Policy for Dense {
    /// Never asked: nothing leaves a dense cache.
    fn score(&self, _entries: &Entries<'_>) -> EvictionOrder {
        EvictionOrder::ByPosition { keep_first: 0 }
    }

    fn traits(&self) -> PolicyTraits<'_> {
        PolicyTraits { keeps_all: true, ..PolicyTraits::default() }
    }
}
