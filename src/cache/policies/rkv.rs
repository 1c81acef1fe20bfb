//! `rkv`: what the last few queries look at stays, with its neighbours, unless other keys of its chunk resemble it (R-KV, Cai et al. 2025,
//! arXiv 2505.24133). The score is `λ · attention − (1 − λ) · redundancy`. Departs from the paper in that it decides anew for each chunk;
//! that a key is compared with those of its own chunk, once, instead of with all that are held, each time, so that a chunk of one token
//! has no redundancy; that the query heads of a KV head count by their mean, not by the largest of their scores; and that the window's
//! own tokens take part.

use serde::Deserialize;
use tch::{Kind, Tensor};

use super::params::fraction;
use super::window::{Pooling, WIDE_KERNEL, by_mass_of, kernel_size, pooled, window_size};
use crate::cache::{Entries, EvictionOrder, NewEntries, Observed, Policy, PolicyTraits, Queries};
use crate::ops::head_vectors::norms;
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RkvParams {
    window_size: Option<usize>,
    kernel_size: Option<usize>,
    attention_weight: Option<f64>,
    similarity_threshold: Option<f64>,
}

#[derive(Debug)]
struct Rkv {
    window: usize,
    kernel: usize,
    lambda: f64,
    threshold: f64,
}

pub(super) fn build(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    let params: RkvParams = recipe.params()?;
    Ok(Box::new(Rkv {
        window: window_size(recipe, params.window_size, cache_length)?,
        kernel: kernel_size(recipe, params.kernel_size.unwrap_or(WIDE_KERNEL), cache_length)?,
        lambda: fraction(recipe, "attention_weight", params.attention_weight.unwrap_or(0.1))?,
        threshold: fraction(recipe, "similarity_threshold", params.similarity_threshold.unwrap_or(0.5))?,
    }))
}

impl Policy for Rkv {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        let scored = entries.observed_bgc.zip(entries.feature(0));
        EvictionOrder::by_score(scored.map(|(attention, similarity)| {
            let empty = entries.position_bgc.lt(0);
            let redundancy = similarity.masked_fill(&empty, f64::from(f32::MIN)).softmax(-1, Kind::Float);
            attention * self.lambda - redundancy * (1.0 - self.lambda)
        }))
    }

    fn traits(&self) -> PolicyTraits<'_> {
        by_mass_of(self.window)
    }

    fn describe(&self, new: &NewEntries<'_>) -> Vec<Tensor> {
        vec![similarity(new.k_bgnd, self.threshold)]
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        let window = self.window.min(seen.num_queries) as f64;
        let mass = seen.attention.mass(Queries::Last(self.window)).to_kind(Kind::Float) / window;
        Some(pooled(&mass, seen.position_bgc, self.kernel, Pooling::Max))
    }
}

/// Keys that are compared with those of the chunk at a time.
const BLOCK: i64 = 256;

/// The mean cosine of each key with the others of its chunk, but for those whose last neighbour it is: of keys that resemble each other the
/// last does not count as redundant. `(B, G, n)` out, f32.
fn similarity(k_bgnd: &Tensor, threshold: f64) -> Tensor {
    let k_bgnd = k_bgnd.to_kind(Kind::Float);
    let directions = &k_bgnd / norms(&k_bgnd).clamp_min(f64::from(f32::MIN_POSITIVE)).unsqueeze(-1);
    let (n, options) = (k_bgnd.size()[2], (Kind::Int, k_bgnd.device()));
    let token = Tensor::arange(n, options);
    let mut sum = directions.select(-1, 0).zeros_like();
    for first in (0..n).step_by(BLOCK as usize) {
        let own = Tensor::arange_start(first, n.min(first + BLOCK), options).unsqueeze(-1);
        let keys = directions.narrow(2, first, own.size()[0]);
        let cosine = keys.matmul(&directions.transpose(-1, -2)).masked_fill(&token.eq_tensor(&own), 0.0);
        // A key that resembles none leaves out token 0, as in the code of the paper.
        let last = (cosine.gt(threshold).to_kind(Kind::Int) * &token).amax([-1i64], true);
        sum += cosine.masked_fill(&token.eq_tensor(&last), 0.0).sum_dim_intlist(&[-2i64][..], false, Kind::Float);
    }
    sum / n as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_equal_keys_the_last_is_not_redundant() {
        let k = Tensor::from_slice(&[1.0f32, 0.0, 2.0, 0.0, 3.0, 0.0]).view([1, 1, 3, 2]);
        let found = Vec::<f32>::try_from(similarity(&k, 0.5).view(-1)).unwrap();
        // The first two have the last as their last neighbour, and the last has the second.
        assert_eq!(found, [2.0, 1.0, 0.0].map(|x: f32| x / 3.0));
    }
}
