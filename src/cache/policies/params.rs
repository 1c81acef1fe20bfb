//! Checks of the parameters that several policies have.

use serde::Deserialize;

use crate::recipe::PolicyRecipe;
use crate::units::Fault;

/// The youngest tokens that stay, as `grace_period` says it.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(untagged, expecting = "expected a number of tokens, or a fraction of the slots such as 0.375")]
pub(super) enum GracePeriod {
    Tokens(usize),
    Fraction(f64),
}

impl Default for GracePeriod {
    fn default() -> Self {
        Self::Tokens(0)
    }
}

impl GracePeriod {
    pub(super) fn tokens(self, recipe: &PolicyRecipe, cache_length: usize) -> Result<usize, Fault> {
        let key = "grace_period";
        match self {
            Self::Tokens(count) => staying(recipe, key, count, cache_length),
            Self::Fraction(part) if (0.0..1.0).contains(&part) => Ok((part * cache_length as f64) as usize),
            Self::Fraction(part) => {
                let message = format!("`{key}` = {part} is neither a number of tokens nor a fraction below 1");
                Err(recipe.reject(Some(key), message, "write a whole number, or a fraction such as 0.375".into()))
            }
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct OnlyGracePeriod {
    #[serde(default)]
    grace_period: GracePeriod,
}

/// The youngest tokens that stay, for a policy whose only parameter is `grace_period`; default none.
pub(super) fn grace_period(recipe: &PolicyRecipe, cache_length: usize) -> Result<usize, Fault> {
    recipe.params::<OnlyGracePeriod>()?.grace_period.tokens(recipe, cache_length)
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct OnlyGracePeriodAndSinks {
    grace_period: GracePeriod,
    #[serde(alias = "sink_tokens")]
    init_grace_tokens: Option<usize>,
}

/// The youngest tokens that stay, and the first ones, for a policy that has no other parameters; default none and four.
pub(super) fn grace_period_and_sinks(recipe: &PolicyRecipe, cache_length: usize) -> Result<[usize; 2], Fault> {
    let params: OnlyGracePeriodAndSinks = recipe.params()?;
    let grace = params.grace_period.tokens(recipe, cache_length)?;
    let sinks = params.init_grace_tokens.unwrap_or(STREAMING_LLM_SINKS);
    Ok([grace, staying(recipe, "init_grace_tokens", sinks, cache_length)?])
}

/// The four first tokens of the paper on `streaming-llm`.
pub(crate) const STREAMING_LLM_SINKS: usize = 4;

/// A number of tokens that stay; some slot must be left to evict.
pub(super) fn staying(recipe: &PolicyRecipe, key: &'static str, count: usize, cache_length: usize) -> Result<usize, Fault> {
    if count < cache_length {
        return Ok(count);
    }
    let message = format!("`{key}` = {count} leaves no slot to evict: `cache_length` is {cache_length}");
    Err(recipe.reject(Some(key), message, format!("choose less than {cache_length}")))
}

/// A number from 0 to 1.
pub(super) fn fraction(recipe: &PolicyRecipe, key: &'static str, value: f64) -> Result<f64, Fault> {
    if (0.0..=1.0).contains(&value) {
        return Ok(value);
    }
    let message = format!("`{key}` = {value} is not a fraction");
    Err(recipe.reject(Some(key), message, "choose a number from 0 to 1".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_youngest_are_a_number_or_a_fraction_of_the_slots() {
        let of = |written: &str, slots| {
            let params = toml::from_str(&format!("grace_period = {written}")).unwrap();
            grace_period(&PolicyRecipe::with_params("tova", params), slots).map_err(|error| error.to_string())
        };
        assert_eq!((of("384", 1024), of("0.375", 1024), of("0.375", 100), of("0.0", 9)), (Ok(384), Ok(384), Ok(37), Ok(0)));
        for (written, words) in [
            ("64", "`grace_period` = 64 leaves no slot to evict: `cache_length` is 64"),
            ("1.0", "`grace_period` = 1 is neither a number of tokens nor a fraction below 1"),
            ("-2", "`grace_period` = -2 is neither a number of tokens nor a fraction below 1"),
            ("\"a\"", "expected a number of tokens, or a fraction of the slots such as 0.375"),
        ] {
            let error = of(written, 64).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
