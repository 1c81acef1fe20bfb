//! `dropkv`: entries without which the outputs of the last few queries would be others stay, with their neighbours (DropKV, 2026,
//! openreview.net, `MqfNzH3TVH`). Without entry c, a query's output o moves by `p / (1 − p) · (o − v)`, where p is its attention weight; the
//! score is the sum of the squares over the window, the mean over the query heads of a KV head. Departs from the paper in that it decides
//! anew for each chunk, and that the window's own tokens are among the neighbours.

use serde::Deserialize;
use tch::{Kind, Tensor};

use super::window::{Pooling, kernel_size, pooled, window_size};
use crate::cache::{Entries, EvictionOrder, Observed, Policy, PolicyTraits};
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DropkvParams {
    window_size: Option<usize>,
    #[serde(default = "default_kernel")]
    kernel_size: usize,
}

fn default_kernel() -> usize {
    7
}

#[derive(Debug)]
struct Dropkv {
    window: usize,
    kernel: usize,
}

pub(super) fn build(choice: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    let params: DropkvParams = choice.params()?;
    let window = window_size(choice, params.window_size, cache_length)?;
    Ok(Box::new(Dropkv { window, kernel: kernel_size(choice, params.kernel_size, cache_length)? }))
}

impl Policy for Dropkv {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        entries
            .observed_bgc
            .map_or(EvictionOrder::ByPosition { keep_first: 0 }, |score| EvictionOrder::ByEntry(score.shallow_clone()))
    }

    fn traits(&self) -> PolicyTraits<'_> {
        // The window itself stays.
        PolicyTraits { grace: self.window, compares_heads: true, ..PolicyTraits::default() }
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        let (weight_bhwc, out_bhwd) = seen.attention.weights(self.window);
        let (_, v_bgcd) = seen.attention.entries();
        let v_bgcd = v_bgcd.masked_fill(&seen.position_bgc.lt(0).unsqueeze(-1), 0.0);
        Some(pooled(&perturbation(&weight_bhwc, &out_bhwd, &v_bgcd), seen.position_bgc, self.kernel, Pooling::Mean))
    }
}

/// What others must get of a query for an entry to count: without it, a query that sees one entry alone would see nothing.
const LEAST_REST: f64 = 1e-6;

/// `Σ_w (p / (1 − p))² · ‖v − o‖²`, the mean over the query heads of a KV head.
///
/// # Shapes
/// `weight (B, H, w, C)`, `out (B, H, w, D)`, `v (B, G, C, D)` in, `(B, G, C)` out.
fn perturbation(weight_bhwc: &Tensor, out_bhwd: &Tensor, v_bgcd: &Tensor) -> Tensor {
    let (b, h, w, slots) = weight_bhwc.size4().unwrap_or_default();
    let (g, d) = (v_bgcd.size()[1], v_bgcd.size()[3]);
    let v_bgcd = v_bgcd.to_kind(weight_bhwc.kind());
    // All heads of a KV head in one product; what is far from both, their mean, is taken off first, as squares of what is large cancel.
    let centre = v_bgcd.mean_dim(&[2i64][..], true, None);
    let v_bgcd = v_bgcd - &centre;
    let out = out_bhwd.to_kind(v_bgcd.kind()).reshape([b, g, h / g * w, d]) - centre;
    let rest = 1.0f64 - weight_bhwc;
    let sensitivity =
        (weight_bhwc / &rest).square().where_scalarother(&rest.gt(LEAST_REST), 0.0).reshape([b, g, h / g * w, slots]);
    let squares = |x: &Tensor| x.square().sum_dim_intlist(&[-1i64][..], true, None);
    let of_values = sensitivity.sum_dim_intlist(&[2i64][..], false, None) * squares(&v_bgcd).squeeze_dim(-1);
    let of_outputs = sensitivity.transpose(-1, -2).matmul(&squares(&out)).squeeze_dim(-1);
    let crossed = (sensitivity.transpose(-1, -2).matmul(&out) * &v_bgcd).sum_dim_intlist(&[-1i64][..], false, None);
    ((of_values + of_outputs - crossed * 2.0) / (h / g) as f64).clamp_min(0.0).to_kind(Kind::Float)
}
