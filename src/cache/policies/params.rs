//! Checks of the parameters that several policies have.

use serde::Deserialize;

use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GracePeriod {
    #[serde(default)]
    grace_period: usize,
}

/// The youngest tokens that stay, for a policy whose only parameter is `grace_period`; default none.
pub(super) fn grace_period(choice: &PolicyRecipe, cache_length: usize) -> Result<usize, Fault> {
    let GracePeriod { grace_period } = choice.params()?;
    staying(choice, "grace_period", grace_period, cache_length)
}

/// A number of tokens that stay; some slot must be left to evict.
pub(super) fn staying(choice: &PolicyRecipe, key: &'static str, count: usize, cache_length: usize) -> Result<usize, Fault> {
    if count < cache_length {
        return Ok(count);
    }
    let message = format!("`{key}` = {count} leaves no slot to evict: `cache_length` is {cache_length}");
    Err(choice.reject(Some(key), message, format!("choose less than {cache_length}")).into())
}

/// A number from 0 to 1.
pub(super) fn fraction(choice: &PolicyRecipe, key: &'static str, value: f64) -> Result<f64, Fault> {
    if (0.0..=1.0).contains(&value) {
        return Ok(value);
    }
    let message = format!("`{key}` = {value} is not a fraction");
    Err(choice.reject(Some(key), message, "choose a number from 0 to 1".into()).into())
}
