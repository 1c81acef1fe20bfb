//! `snapkv`: what the last few queries look at stays, together with its neighbours (Li et al. 2024, arXiv 2404.14469). Departs from the
//! paper in that it decides anew for each chunk, not once for a prompt (the first time by the last piece of the prefill span alone);
//! neighbours are those by position among the tokens still held, the window's own among them; and the query heads of a KV head decide
//! together.

use serde::Deserialize;
use tch::{Kind, Tensor};

use super::params::staying;
use crate::cache::{Entries, EvictionOrder, Observed, Policy, PolicyTraits, Queries};
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SnapkvParams {
    window_size: Option<usize>,
    #[serde(default = "default_kernel")]
    kernel_size: usize,
    #[serde(default)]
    pooling: Pooling,
}

fn default_kernel() -> usize {
    5
}

/// The observation window of the paper's code, in tokens.
const WINDOW: usize = 32;

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Pooling {
    #[default]
    Max,
    Mean,
}

#[derive(Debug)]
struct Snapkv {
    window: usize,
    kernel: usize,
    pooling: Pooling,
}

pub(super) fn build(choice: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    let params: SnapkvParams = choice.params()?;
    let window = params.window_size.unwrap_or_else(|| (cache_length / 8).clamp(1, WINDOW));
    if window == 0 {
        let message = "`window_size` = 0 leaves no query to decide".to_owned();
        return Err(choice.reject(Some("window_size"), message, "choose at least 1".into()).into());
    }
    if params.kernel_size.is_multiple_of(2) {
        let message = format!("`kernel_size` = {} has no middle", params.kernel_size);
        return Err(choice.reject(Some("kernel_size"), message, "choose an odd number; 1 pools nothing".into()).into());
    }
    let window = staying(choice, "window_size", window, cache_length)?;
    staying(choice, "kernel_size", params.kernel_size, cache_length.max(WINDOW))?;
    Ok(Box::new(Snapkv { window, kernel: params.kernel_size, pooling: params.pooling }))
}

impl Policy for Snapkv {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        entries
            .observed_bgc
            .map_or(EvictionOrder::ByPosition { keep_first: 0 }, |score| EvictionOrder::ByEntry(score.shallow_clone()))
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

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        let mass = seen.attention.mass(Queries::Last(self.window)).to_kind(Kind::Float);
        Some(self.pool(&mass, seen.position_bgc))
    }
}

impl Snapkv {
    /// Each entry takes the largest (or the mean) of itself and its neighbours in the order of positions.
    fn pool(&self, mass_bgc: &Tensor, position_bgc: &Tensor) -> Tensor {
        let order = position_bgc.argsort(-1, false);
        let sorted = mass_bgc.gather(2, &order, false);
        // An empty slot is nobody's neighbour.
        let held = position_bgc.ge(0).to_kind(Kind::Float).gather(2, &order, false);
        let (kernel, half) = (self.kernel as i64, self.kernel as i64 / 2);
        let pooled = match self.pooling {
            Pooling::Max => sorted.max_pool1d([kernel], [1], [half], [1], false),
            // The ends have fewer neighbours, and the mean is that of those they have.
            Pooling::Mean => {
                let sum = |x: &Tensor| {
                    x.constant_pad_nd([half, half]).unfold(2, kernel, 1).sum_dim_intlist(&[-1i64][..], false, Kind::Float)
                };
                sum(&(sorted * &held)) / sum(&held).clamp_min(1.0)
            }
        };
        pooled.zeros_like().scatter(2, &order, &pooled)
    }
}
