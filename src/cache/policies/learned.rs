//! `learned`: entries that the model's gates score high stay: small functions, learned, of what a layer computes keys and values from
//! (KVzap, Jegou and Jeblick 2026, arXiv 2601.07891). Departs from the paper in that a cache of fixed size evicts the lowest scores,
//! instead of all below a threshold. Where a gate says the logarithm of the mean attention that an entry can expect from a later query,
//! `prior_queries` n₀ lets what it has received since count too: the score is `(n₀ · exp(gate) + mass) / (n₀ + n)` after n queries.

use serde::Deserialize;
use tch::{Kind, Tensor};

use super::params::{GracePeriod, default_sinks, staying};
use crate::cache::{Entries, EvictionOrder, NewEntries, Observed, Policy, PolicyTraits, Queries};
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LearnedParams {
    #[serde(default)]
    grace_period: GracePeriod,
    #[serde(default = "default_sinks", alias = "sink_tokens")]
    init_grace_tokens: usize,
    prior_queries: Option<f64>,
}

#[derive(Debug)]
struct Learned {
    grace: usize,
    sinks: usize,
    prior: Option<f64>,
}

pub(super) fn build(choice: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    let params: LearnedParams = choice.params()?;
    let grace = params.grace_period.tokens(choice, cache_length)?;
    let sinks = staying(choice, "init_grace_tokens", params.init_grace_tokens, cache_length)?;
    if let Some(prior) = params.prior_queries.filter(|prior| !(prior.is_finite() && *prior > 0.0)) {
        let message = format!("`prior_queries` = {prior} is no number of queries");
        return Err(choice.reject(Some("prior_queries"), message, "choose a number above 0, such as 64".into()).into());
    }
    Ok(Box::new(Learned { grace, sinks, prior: params.prior_queries }))
}

impl Policy for Learned {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        EvictionOrder::by_score(entries.feature(0).map(|gate| {
            let Some((prior, mass)) = self.prior.zip(entries.observed_bgc) else { return gate };
            let queries = (entries.next_position as i64 - entries.position_bgc).to_kind(Kind::Float);
            (gate.exp() * prior + mass) / (queries + prior)
        }))
    }

    fn traits(&self) -> PolicyTraits<'_> {
        let queries = self.prior.map(|_| Queries::All);
        PolicyTraits {
            grace: self.grace,
            sinks: self.sinks,
            prefill_queries: queries,
            chunk_queries: queries,
            compares_heads: true,
            takes_gates: true,
            ..PolicyTraits::default()
        }
    }

    fn describe(&self, new: &NewEntries<'_>) -> Vec<Tensor> {
        new.gate_bgn.iter().map(Tensor::shallow_clone).collect()
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        self.prior.map(|_| seen.plus(seen.attention.mass(Queries::All)))
    }
}
