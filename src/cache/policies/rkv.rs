//! `rkv`: what the last few queries look at stays, with its neighbours, unless other keys of its chunk resemble it (R-KV, Cai et al. 2025,
//! arXiv 2505.24133). The score is `λ · attention − (1 − λ) · redundancy`. Departs from the paper in that it decides anew for each chunk,
//! and that a key is compared with those of its own chunk, once, instead of with all that are held, each time.

use serde::Deserialize;
use tch::{Kind, Tensor};

use super::params::fraction;
use super::window::{Pooling, kernel_size, pooled, window_size};
use crate::cache::{Entries, EvictionOrder, NewEntries, Observed, Policy, PolicyTraits, Queries};
use crate::ops::head_vectors::norms;
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RkvParams {
    window_size: Option<usize>,
    #[serde(default = "default_kernel")]
    kernel_size: usize,
    #[serde(default = "default_lambda")]
    attention_weight: f64,
    #[serde(default = "default_threshold")]
    similarity_threshold: f64,
}

fn default_kernel() -> usize {
    7
}

fn default_lambda() -> f64 {
    0.1
}

fn default_threshold() -> f64 {
    0.5
}

#[derive(Debug)]
struct Rkv {
    window: usize,
    kernel: usize,
    lambda: f64,
    threshold: f64,
}

pub(super) fn build(choice: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    let params: RkvParams = choice.params()?;
    Ok(Box::new(Rkv {
        window: window_size(choice, params.window_size, cache_length)?,
        kernel: kernel_size(choice, params.kernel_size, cache_length)?,
        lambda: fraction(choice, "attention_weight", params.attention_weight)?,
        threshold: fraction(choice, "similarity_threshold", params.similarity_threshold)?,
    }))
}

impl Policy for Rkv {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        let scored = entries.observed_bgc.zip(entries.feature(0));
        scored.map_or(EvictionOrder::ByPosition { keep_first: 0 }, |(attention, similarity)| {
            let empty = entries.position_bgc.lt(0);
            let redundancy = similarity.masked_fill(&empty, f64::from(f32::MIN)).softmax(-1, Kind::Float);
            EvictionOrder::ByEntry(attention * self.lambda - redundancy * (1.0 - self.lambda))
        })
    }

    fn traits(&self) -> PolicyTraits<'_> {
        let window = Some(Queries::Last(self.window));
        // The window itself stays.
        PolicyTraits {
            grace: self.window,
            prefill_queries: window,
            chunk_queries: window,
            compares_heads: true,
            ..PolicyTraits::default()
        }
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

/// The mean cosine of each key with the others of its chunk; the last one that resembles it does not count, so that of keys that
/// resemble each other the last stays.
///
/// # Shapes
/// `(B, G, n, D)` in, `(B, G, n)` out, f32.
fn similarity(k_bgnd: &Tensor, threshold: f64) -> Tensor {
    let directions = k_bgnd / norms(k_bgnd).clamp_min(f64::from(f32::MIN_POSITIVE)).unsqueeze(-1);
    let n = k_bgnd.size()[2];
    let token = Tensor::arange(n, (Kind::Int64, k_bgnd.device()));
    let cosine = directions.matmul(&directions.transpose(-1, -2)).masked_fill(&token.eq_tensor(&token.unsqueeze(-1)), 0.0);
    // No key resembles any: token 0 is left out, whatever its cosine.
    let (last, _) = (cosine.gt(threshold).to_kind(Kind::Int64) * &token).max_dim(-1, true);
    let others = cosine.masked_fill(&token.eq_tensor(&last), 0.0);
    others.mean_dim(&[-1i64][..], false, None).to_kind(Kind::Float)
}
