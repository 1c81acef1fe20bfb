//! `lastrec` and `streaming-llm`: the most recent tokens and the first few, which every query keeps looking at (attention sinks, Xiao et
//! al. 2023, arXiv 2309.17453). `streaming-llm` has the four first tokens of the paper, and departs from it in that keys keep the
//! positions of their tokens instead of those of their slots.

use serde::Deserialize;

use super::params::staying;
use crate::cache::{Entries, EvictionOrder, Policy, PolicyTraits, Scope};
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LastrecParams {
    #[serde(alias = "sink_tokens")]
    init_grace_tokens: Option<usize>,
}

#[derive(Debug)]
struct Lastrec {
    sinks: usize,
}

pub(super) fn build(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    with_default(recipe, cache_length, (cache_length / 8).clamp(1, 16))
}

/// The policy, which keeps `default` first tokens unless the recipe says how many.
pub(super) fn with_default(recipe: &PolicyRecipe, cache_length: usize, default: usize) -> Result<Box<dyn Policy>, Fault> {
    let params: LastrecParams = recipe.params()?;
    let sinks = staying(recipe, "init_grace_tokens", params.init_grace_tokens.unwrap_or(default), cache_length)?;
    Ok(Box::new(Lastrec { sinks }))
}

/// What a sliding window keeps: the most recent tokens, and no first ones.
pub(crate) fn rolling() -> Box<dyn Policy> {
    Box::new(Lastrec { sinks: 0 })
}

impl Policy for Lastrec {
    fn score(&self, _entries: &Entries<'_>) -> EvictionOrder {
        EvictionOrder::ByPosition { keep_first: self.sinks }
    }

    fn traits(&self) -> PolicyTraits<'_> {
        PolicyTraits { sinks: self.sinks, scope: Scope::Batch, ..PolicyTraits::default() }
    }
}
