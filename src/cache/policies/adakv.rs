//! `adakv`: another policy with a budget for each head, by what its scores say when the first entries must leave (Feng et al. 2024,
//! arXiv 2407.11550). Departs from the paper in that the better half of what is held decides, not a compressed prompt, and that one
//! budget may be distributed over the heads of all layers.

use serde::Deserialize;
use tch::Tensor;

use super::Constructor;
use super::params::fraction;
use crate::cache::{BudgetRule, Entries, EvictionOrder, NewEntries, Observed, Policy, PolicyTraits, Scope};
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AdaKvParams {
    /// Accepted here and read by [`PolicyRecipe::inner`].
    #[serde(rename = "policy")]
    _policy: Option<serde::de::IgnoredAny>,
    floor: Option<f64>,
    #[serde(default)]
    across_layers: bool,
}

/// The part of the cache length that every head keeps: the safeguard of the Ada-KV paper.
const DEFAULT_FLOOR: f64 = 0.2;

const DEFAULT_POLICY: &str = "snapkv";

#[derive(Debug)]
struct AdaKv {
    inner: Box<dyn Policy>,
    rule: BudgetRule,
}

/// The policy around the one that its parameters name, which `build` makes.
pub(super) fn around(recipe: &PolicyRecipe, cache_length: usize, build: Constructor) -> Result<Box<dyn Policy>, Fault> {
    let params: AdaKvParams = recipe.params()?;
    let written = params.floor.map(|floor| fraction(recipe, "floor", floor)).transpose()?;
    let inner = recipe.inner("policy", DEFAULT_POLICY)?;
    let policy = build(&inner, cache_length)?;
    if !policy.traits().compares_heads {
        let message = format!("`adakv` shares out slots by scores, and the policy `{}` has none to compare heads by", inner.name);
        let hint = "choose `snapkv`, `defensivekv`, `dropkv`, `rkv`, `knorm`, `keydiff`, `expected-attention`, `learned`, `triattention`, or a policy of \
                    the h2o family with `score_prefill = true`";
        return Err(recipe.reject(Some("policy"), message, hint.to_owned()));
    }
    // In a small cache, too, the smallest share has a slot beside those that are protected.
    let is_enough = (DEFAULT_FLOOR * cache_length as f64) as usize > policy.traits().protected();
    let needed = (policy.traits().protected() as f64 + 1.5) / cache_length as f64;
    let floor = written.unwrap_or(if is_enough { DEFAULT_FLOOR } else { needed.min(1.0) });
    let rule = BudgetRule { floor, across_layers: params.across_layers };
    Ok(Box::new(AdaKv { inner: policy, rule }))
}

impl Policy for AdaKv {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        self.inner.score(entries)
    }

    fn traits(&self) -> PolicyTraits<'_> {
        // Heads with different budgets lose different entries, and their scores are compared once.
        PolicyTraits { budgets: Some(self.rule), compares_heads: false, scope: Scope::Head, ..self.inner.traits() }
    }

    fn describe(&self, new: &NewEntries<'_>) -> Vec<Tensor> {
        self.inner.describe(new)
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        self.inner.observe(seen)
    }
}
