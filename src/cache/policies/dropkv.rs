//! `dropkv`: entries without which the outputs of the last few queries would be others stay, with their neighbours (DropKV, 2026,
//! openreview.net, `MqfNzH3TVH`). Without entry c, a query's output o moves by `p / (1 − p) · (o − v)`, where p is its attention weight; the
//! score is the sum of the squares over the window, the mean over the query heads of a KV head. Departs from the paper in that it decides
//! anew for each chunk, and that the window's own tokens are among the neighbours.

use tch::{Kind, Tensor};

use super::window::{Pooling, WIDE_KERNEL, pooled, window_and_kernel};
use crate::cache::{Observed, Policy, PolicyTraits};
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug)]
struct Dropkv {
    window: usize,
    kernel: usize,
}

pub(super) fn build(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    let [window, kernel] = window_and_kernel(recipe, cache_length, WIDE_KERNEL)?;
    Ok(Box::new(Dropkv { window, kernel }))
}

impl Policy for Dropkv {
    fn traits(&self) -> PolicyTraits<'_> {
        // The window itself stays.
        PolicyTraits { grace: self.window, compares_heads: true, ..PolicyTraits::default() }
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        let (_, v_bgcd) = seen.attention.entries();
        let v_bgcd = v_bgcd.masked_fill(&seen.position_bgc.lt(0).unsqueeze(-1), 0.0);
        let moved = perturbation(&seen.attention.weights(self.window), &v_bgcd);
        Some(pooled(&moved, seen.position_bgc, self.kernel, Pooling::Mean))
    }
}

/// The least that others count of a query, as in the code of the paper.
const MIN_REST: f64 = 1e-6;
/// A query of which others get no more sees one entry alone, which moves nothing.
const ALONE: f64 = 1e-12;

/// `Σ_w (p / (1 − p))² · ‖v − o‖²`, the mean over the query heads of a KV head. In f64: the nearer p is to 1, the nearer o is to v, so that
/// a small difference of squares is multiplied with a large number; and `1 − p` is summed from what the others get. `(B, G, C)` out, f32.
fn perturbation(weight_bhwc: &Tensor, v_bgcd: &Tensor) -> Tensor {
    let (b, h, w, slots) = weight_bhwc.size4().unwrap_or_default();
    let g = v_bgcd.size()[1];
    // All heads of a KV head in one product.
    let (weight, v_bgcd) = (weight_bhwc.to_kind(Kind::Double).reshape([b, g, h / g * w, slots]), v_bgcd.to_kind(Kind::Double));
    // With an attention sink the weights sum to less than 1.
    let total = weight.sum_dim_intlist(&[-1i64][..], true, None).clamp_min(1.0);
    let out = weight.matmul(&v_bgcd) / &total;
    let rest = total - &weight;
    let sensitivity = (&weight / rest.clamp_min(MIN_REST)).square().where_scalarother(&rest.gt(ALONE), 0.0);
    let squares = |x: &Tensor| x.square().sum_dim_intlist(&[-1i64][..], true, None);
    let of_values = sensitivity.sum_dim_intlist(&[2i64][..], false, None) * squares(&v_bgcd).squeeze_dim(-1);
    let of_outputs = sensitivity.transpose(-1, -2).matmul(&squares(&out)).squeeze_dim(-1);
    let crossed = (sensitivity.transpose(-1, -2).matmul(&out) * &v_bgcd).sum_dim_intlist(&[-1i64][..], false, None);
    ((of_values + of_outputs - crossed * 2.0) / (h / g) as f64).clamp_min(0.0).to_kind(Kind::Float)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    /// Two entries, of which the first gets nearly all: without it the second gives all.
    #[test]
    fn what_moves_most_is_no_noise_however_little_the_others_get() {
        let v = Tensor::from_slice(&[0.3f32, -1.0, 0.7, 2.0, 0.1, 0.4, -0.9, 0.2]).view([1, 1, 2, 4]);
        let far = f64::try_from((v.get(0).get(0).get(0) - v.get(0).get(0).get(1)).square().sum(Kind::Double)).unwrap();
        for rest in [0.1f64, 1e-3, 1e-5] {
            for kind in [Kind::Float, Kind::BFloat16] {
                let weight = Tensor::from_slice(&[1.0 - rest as f32, rest as f32]).view([1, 1, 1, 2]);
                let moved = perturbation(&weight, &v.to_kind(kind)).double_value(&[0, 0, 0]);
                let tolerance = if kind == Kind::Float { 1e-3 } else { 0.02 };
                assert!((moved / far / (1.0 - rest).powi(2) - 1.0).abs() < tolerance, "{rest} {kind:?}: {moved} of {far}");
            }
        }
        // A query that sees a single entry has no output without it, so its score is 0.
        let alone = Tensor::ones([1, 1, 1, 1], (Kind::Float, Device::Cpu));
        assert!(perturbation(&alone, &v.narrow(2, 0, 1)).double_value(&[0, 0, 0]) < 1e-6);
    }
}
