//! `learned`: entries stay that the model's gates expect to matter: small functions, learned, of what a layer computes keys and values from
//! (KVzap, Jegou and Jeblick 2026, arXiv 2601.07891). A gate says the logarithm of what an entry is worth. After n queries that gave an entry
//! the attention mass m, its score is the logarithm of `exp(gate) · (m / n) / n`. With `gate_alone` it is the gate's, as in the paper. Departs
//! from the paper in that a cache of fixed size evicts the lowest scores, instead of all below a threshold.

use serde::Deserialize;
use tch::{Kind, Tensor};

use super::params::{GracePeriod, STREAMING_LLM_SINKS, staying};
use crate::cache::{Entries, EvictionOrder, Observed, Policy, PolicyTraits, Queries};
use crate::ops::attention::ModelFeature;
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct LearnedParams {
    grace_period: GracePeriod,
    #[serde(alias = "sink_tokens")]
    init_grace_tokens: Option<usize>,
    gate_alone: bool,
}

#[derive(Debug)]
struct Learned {
    grace: usize,
    sinks: usize,
    gate_alone: bool,
}

pub(super) fn build(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    let params: LearnedParams = recipe.params()?;
    let grace = params.grace_period.tokens(recipe, cache_length)?;
    let sinks = params.init_grace_tokens.unwrap_or(STREAMING_LLM_SINKS);
    let sinks = staying(recipe, "init_grace_tokens", sinks, cache_length)?;
    Ok(Box::new(Learned { grace, sinks, gate_alone: params.gate_alone }))
}

impl Policy for Learned {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        EvictionOrder::by_score(entries.feature(0).map(|gate| {
            let Some(mass) = entries.observed_bgc else { return gate };
            let queries = (entries.next_position as i64 - entries.position_bgc).to_kind(Kind::Float);
            gate + (mass.clamp_min(f64::from(f32::MIN_POSITIVE)) / queries.square()).log()
        }))
    }

    fn traits(&self) -> PolicyTraits<'_> {
        let queries = (!self.gate_alone).then_some(Queries::All);
        PolicyTraits {
            grace: self.grace,
            sinks: self.sinks,
            prefill_queries: queries,
            chunk_queries: queries,
            compares_heads: true,
            model_feature: Some(ModelFeature::Gate),
            ..PolicyTraits::default()
        }
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        (!self.gate_alone).then(|| seen.plus(seen.attention.mass(Queries::All)))
    }
}
