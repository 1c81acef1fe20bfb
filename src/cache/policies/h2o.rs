//! `h2o`: heavy hitters stay. The score is the attention mass to an entry so far (Zhang et al. 2023, arXiv 2306.14048). Departs from
//! the paper in that each sequence and KV head decides for itself, recent tokens are protected only as far as `grace_period` says, and the
//! prefill span is scored only if `score_prefill` says so; before there are scores, a part of the first tokens stays.

use super::heavy_hitters::{HeavyHitters, HeavyHittersParams};
use crate::cache::{CacheError, Policy};
use crate::recipe::PolicyRecipe;

pub(super) fn build(choice: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, CacheError> {
    let params: HeavyHittersParams = choice.params()?;
    Ok(Box::new(HeavyHitters::new(choice, &params, cache_length)?))
}
