//! The parameters of `qh2o` and `qh2o-vlen`: those of the family, and how much the error of quantisation weighs.

use serde::Deserialize;

use super::heavy_hitters::{self, HeavyHitters, default_keep};
use super::params::fraction;
use crate::cache::CacheError;
use crate::recipe::PolicyRecipe;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Qh2oParams {
    #[serde(default)]
    grace_period: usize,
    #[serde(default = "default_keep")]
    keep_initial_fraction: f64,
    #[serde(default)]
    normalize_scores: bool,
    #[serde(default)]
    reference_counts: bool,
    #[serde(default)]
    score_prefill: bool,
    #[serde(default = "default_combination")]
    combination_constant: f64,
}

fn default_combination() -> f64 {
    0.5
}

impl Qh2oParams {
    /// The scores of the family, with the error of quantisation in them.
    pub(super) fn read(choice: &PolicyRecipe, cache_length: usize) -> Result<HeavyHitters, CacheError> {
        let p: Self = choice.params()?;
        let family = heavy_hitters::HeavyHittersParams {
            grace_period: p.grace_period,
            keep_initial_fraction: p.keep_initial_fraction,
            normalize_scores: p.normalize_scores,
            reference_counts: p.reference_counts,
            score_prefill: p.score_prefill,
        };
        let attention = fraction(choice, "combination_constant", p.combination_constant)?;
        Ok(HeavyHitters::new(choice, &family, cache_length)?.beside_error(attention))
    }
}
