//! `h2o-vlen`: as `h2o`, but attention counts for as much as it moves the output: it is weighted with the norm of the value.

use super::heavy_hitters::{HeavyHitters, HeavyHittersParams};
use crate::cache::{CacheError, Policy};
use crate::recipe::PolicyRecipe;

pub(super) fn build(choice: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, CacheError> {
    let params: HeavyHittersParams = choice.params()?;
    Ok(Box::new(HeavyHitters::new(choice, &params, cache_length)?.by_value()))
}
