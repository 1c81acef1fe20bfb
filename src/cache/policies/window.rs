//! What policies share that score by the last few queries of a chunk, the observation window: its size, and pooling over neighbours.

use serde::Deserialize;
use tch::{Kind, Tensor};

use super::params::staying;
use crate::cache::{PolicyTraits, Queries};
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

/// The observation window of SnapKV's code, in tokens.
const WINDOW: usize = 32;

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Pooling {
    #[default]
    Max,
    Mean,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct OnlyWindowAndKernel {
    window_size: Option<usize>,
    kernel_size: Option<usize>,
}

/// Window and kernel, for a policy that has no other parameters.
pub(super) fn window_and_kernel(recipe: &PolicyRecipe, cache_length: usize, kernel: usize) -> Result<[usize; 2], Fault> {
    let params: OnlyWindowAndKernel = recipe.params()?;
    let window = window_size(recipe, params.window_size, cache_length)?;
    Ok([window, kernel_size(recipe, params.kernel_size.unwrap_or(kernel), cache_length)?])
}

/// The kernel of DropKV's and R-KV's code.
pub(super) const WIDE_KERNEL: usize = 7;

/// The traits of a policy whose scores are the attention mass of the window, which itself stays.
pub(super) fn by_mass_of(window: usize) -> PolicyTraits<'static> {
    let queries = Some(Queries::Last(window));
    PolicyTraits {
        grace: window,
        prefill_queries: queries,
        chunk_queries: queries,
        compares_heads: true,
        ..PolicyTraits::default()
    }
}

/// The parameter `window_size`: by default an eighth of the cache, at most 32 tokens.
pub(super) fn window_size(recipe: &PolicyRecipe, written: Option<usize>, cache_length: usize) -> Result<usize, Fault> {
    let window = written.unwrap_or_else(|| (cache_length / 8).clamp(1, WINDOW));
    if window == 0 {
        let message = "`window_size` = 0 leaves no query to decide".to_owned();
        return Err(recipe.reject(Some("window_size"), message, "choose at least 1".into()));
    }
    staying(recipe, "window_size", window, cache_length)
}

/// The parameter `kernel_size`: an entry and its neighbours, as many on each side.
pub(super) fn kernel_size(recipe: &PolicyRecipe, written: usize, cache_length: usize) -> Result<usize, Fault> {
    if written.is_multiple_of(2) {
        let message = format!("`kernel_size` = {written} has no middle");
        return Err(recipe.reject(Some("kernel_size"), message, "choose an odd number; 1 pools nothing".into()));
    }
    staying(recipe, "kernel_size", written, cache_length.max(WINDOW))
}

/// Each entry takes the largest (or the mean) of itself and its neighbours in the order of positions. At the ends there are fewer
/// neighbours, and the mean is that of those there are. `(B, G, C)` all, f32 out; a mean may be that of rows `(B, G, R, C)`, which share the
/// positions `(B, G, 1, C)`.
pub(super) fn pooled(score: &Tensor, position: &Tensor, kernel: usize, pooling: Pooling) -> Tensor {
    let order = position.argsort(-1, false);
    let order_of_rows = order.expand_as(score);
    let sorted = score.gather(-1, &order_of_rows, false);
    // An empty slot is nobody's neighbour.
    let held = position.ge(0).to_kind(sorted.kind()).gather(-1, &order, false);
    let (kernel, half) = (kernel as i64, kernel as i64 / 2);
    let pooled = match pooling {
        Pooling::Max => sorted.max_pool1d([kernel], [1], [half], [1], false),
        Pooling::Mean => {
            let sum =
                |x: &Tensor| x.constant_pad_nd([half, half]).unfold(-1, kernel, 1).sum_dim_intlist(&[-1i64][..], false, x.kind());
            sum(&(sorted * &held)) / sum(&held).clamp_min(1.0)
        }
    };
    pooled.zeros_like().scatter(-1, &order_of_rows, &pooled).to_kind(Kind::Float)
}
