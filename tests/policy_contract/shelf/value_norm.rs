//! `value-norm`: tokens of short values leave, as they move the output least; the first few stay.

use serde::Deserialize;
use tch::{Kind, Tensor};

use super::params::staying;
use crate::cache::{Entries, EvictionOrder, NewEntries, Policy, PolicyTraits};
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    #[serde(default = "default_sinks")]
    init_grace_tokens: usize,
}

fn default_sinks() -> usize {
    4
}

#[derive(Debug)]
struct ValueNorm {
    sinks: usize,
}

pub(super) fn build(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    let params: Params = recipe.params()?;
    Ok(Box::new(ValueNorm { sinks: staying(recipe, "init_grace_tokens", params.init_grace_tokens, cache_length)? }))
}

impl Policy for ValueNorm {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        // Nothing is described before the first chunk is written, and nothing leaves before it either.
        EvictionOrder::by_score(entries.feature(0))
    }

    fn traits(&self) -> PolicyTraits<'_> {
        PolicyTraits { sinks: self.sinks, ..PolicyTraits::default() }
    }

    fn describe(&self, new: &NewEntries<'_>) -> Vec<Tensor> {
        vec![new.v_bgnd.norm_scalaropt_dim(2.0, [-1i64], false).to_kind(Kind::Float)]
    }
}
