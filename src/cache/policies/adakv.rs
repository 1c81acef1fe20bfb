//! `adakv`: another policy with a share of the slots for each head, by what its scores say when the first entries must leave (Feng et
//! al. 2024, arXiv 2407.11550). Departs from the paper in that the better half of what is held decides, not a compressed prompt.

use serde::Deserialize;
use tch::Tensor;

use super::params::fraction;
use crate::cache::{CacheError, Entries, EvictionOrder, NewEntries, Observed, Policy, Queries, build as build_inner};
use crate::recipe::{InitialPart, PolicyRecipe};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AdaKvParams {
    /// Read by [`PolicyRecipe::inner`].
    #[serde(rename = "policy")]
    _policy: Option<serde::de::IgnoredAny>,
    #[serde(default = "default_floor")]
    floor: f64,
}

/// As the paper's safeguard.
fn default_floor() -> f64 {
    0.2
}

const DEFAULT_POLICY: &str = "snapkv";

#[derive(Debug)]
struct AdaKv {
    inner: Box<dyn Policy>,
    floor: f64,
}

pub(super) fn build(choice: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, CacheError> {
    let params: AdaKvParams = choice.params()?;
    let floor = fraction(choice, "floor", params.floor)?;
    let inner = choice.inner("policy", DEFAULT_POLICY)?;
    let policy = build_inner(&inner, cache_length)?;
    if !policy.compares_heads() {
        let message = format!("`adakv` shares out slots by scores, and the policy `{}` has none to compare heads by", inner.name);
        let hint = "choose `snapkv`, `knorm`, `keydiff`, `expected-attention`, or a policy of the h2o family \
                    with `score_prefill = true`";
        return Err(choice.reject(Some("policy"), message, hint.to_owned()).into());
    }
    Ok(Box::new(AdaKv { inner: policy, floor }))
}

impl Policy for AdaKv {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        self.inner.score(entries)
    }

    fn grace(&self) -> usize {
        self.inner.grace()
    }

    fn sinks(&self) -> usize {
        self.inner.sinks()
    }

    fn protects(&self, initial: (usize, usize)) -> (usize, usize) {
        self.inner.protects(initial)
    }

    fn initial_part(&self) -> Option<&InitialPart> {
        self.inner.initial_part()
    }

    fn describe(&self, new: &NewEntries<'_>) -> Vec<Tensor> {
        self.inner.describe(new)
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        self.inner.observe(seen)
    }

    fn required_queries(&self, is_prefill: bool) -> Option<Queries> {
        self.inner.required_queries(is_prefill)
    }

    fn couples_sequences(&self) -> bool {
        self.inner.couples_sequences()
    }

    fn needs_quantised(&self) -> bool {
        self.inner.needs_quantised()
    }

    fn shares_out(&self) -> Option<f64> {
        Some(self.floor)
    }

    /// The smallest share must hold a chunk and what is protected.
    fn max_chunk_size(&self, cache_length: usize) -> usize {
        self.inner.max_chunk_size((self.floor * cache_length as f64) as usize)
    }
}
