//! A place like `src/cache/policies/`, with the same neighbours: the guide's policy is compiled here as it would be there.

#[path = "../../../src/cache/policies/params.rs"]
#[allow(dead_code, reason = "the guide's policy does not need every check")]
mod params;
mod value_norm;

use kvtune::cache::Policy;
use kvtune::recipe::PolicyRecipe;
use kvtune::units::Fault;

/// The guide's policy.
pub(crate) const EXAMPLE: &str = "value-norm";

/// Builds the guide's policy.
pub(crate) fn build(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    value_norm::build(recipe, cache_length)
}
