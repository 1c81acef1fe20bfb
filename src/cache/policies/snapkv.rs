//! `snapkv`: what the last few queries look at stays, together with its neighbours (Li et al. 2024, arXiv 2404.14469). Departs from the
//! paper in that it decides anew for each chunk, not once for a prompt (the first time by the last piece of the prefill span alone);
//! neighbours are those by position among the tokens still held, the window's own among them; and the query heads of a KV head decide
//! together.

use serde::Deserialize;
use tch::{Kind, Tensor};

use super::window::{Pooling, by_mass_of, kernel_size, pooled, window_size};
use crate::cache::{Observed, Policy, PolicyTraits, Queries};
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct SnapkvParams {
    window_size: Option<usize>,
    kernel_size: Option<usize>,
    pooling: Pooling,
}

#[derive(Debug)]
struct Snapkv {
    window: usize,
    kernel: usize,
    pooling: Pooling,
}

pub(super) fn build(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    let params: SnapkvParams = recipe.params()?;
    let window = window_size(recipe, params.window_size, cache_length)?;
    let kernel = kernel_size(recipe, params.kernel_size.unwrap_or(5), cache_length)?;
    Ok(Box::new(Snapkv { window, kernel, pooling: params.pooling }))
}

impl Policy for Snapkv {
    fn traits(&self) -> PolicyTraits<'_> {
        by_mass_of(self.window)
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        let mass = seen.attention.mass(Queries::Last(self.window)).to_kind(Kind::Float);
        Some(pooled(&mass, seen.position_bgc, self.kernel, self.pooling))
    }
}
