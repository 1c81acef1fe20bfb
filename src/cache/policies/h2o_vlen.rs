//! `h2o-vlen`: as `h2o`, but attention counts for as much as it moves the output: it is weighted with the norm of the value.

use super::heavy_hitters::{HeavyHitters, Params};
use crate::cache::{CacheError, Policy};
use crate::recipe::Choice;

pub(super) fn build(choice: &Choice, cache_length: usize) -> Result<Box<dyn Policy>, CacheError> {
    let params: Params = choice.params()?;
    Ok(Box::new(HeavyHitters::new(choice, &params, cache_length)?.by_value()))
}
