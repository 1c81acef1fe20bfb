//! `expected-attention`: what queries like the last chunk's can be expected to look at stays, weighted with the norm of the value
//! (Devoto et al. 2025, arXiv 2510.00636). Departs from the paper in taking the queries' mean and covariance after the rotation to
//! their positions, instead of turning unrotated ones to future positions; before the first eviction, of the prefill span's last piece.
//! A soft cap of the layer's scores does not count: what is expected of them is a formula of the plain product.

use tch::{Kind, Tensor};

use super::heavy_hitters::norm;
use super::params::grace_period_and_sinks;
use crate::cache::{Observed, Policy, PolicyTraits};
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug)]
struct ExpectedAttention {
    grace: usize,
    sinks: usize,
}

pub(super) fn build(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    let [grace, sinks] = grace_period_and_sinks(recipe, cache_length)?;
    Ok(Box::new(ExpectedAttention { grace, sinks }))
}

impl Policy for ExpectedAttention {
    fn traits(&self) -> PolicyTraits<'_> {
        PolicyTraits { grace: self.grace, sinks: self.sinks, compares_heads: true, ..PolicyTraits::default() }
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        let (q_bhnd, scale) = seen.attention.queries();
        let (k_bgcd, v_bgcd) = seen.attention.entries();
        Some(expected(&q_bhnd, &k_bgcd, scale, &seen.position_bgc.ge(0)) * norm(&v_bgcd))
    }
}

/// `softmax_c(μ·k_c·s + ½ s² k_cᵀΣk_c)`, the mean over the query heads of a KV head `(B, G, C)`, f32: for normally distributed
/// queries the logarithm of the mean of `exp(q·k·s)` is what stands in the softmax. Slots that hold nothing are left out.
fn expected(q_bhnd: &Tensor, k_bgcd: &Tensor, scale: f64, held_bgc: &Tensor) -> Tensor {
    let (b, h, n, d) = q_bhnd.size4().unwrap_or_default();
    let (g, slots) = (k_bgcd.size()[1], k_bgcd.size()[2]);
    let q = (q_bhnd.to_kind(Kind::Float) * scale).view([b, g, h / g, n, d]);
    let k = k_bgcd.to_kind(Kind::Float).unsqueeze(2);
    let mean = q.mean_dim(&[3i64][..], true, Kind::Float);
    let centred = q - &mean;
    // With fewer queries than channels, as in generation, the covariance would be larger than the queries.
    let squares = if n < d {
        k.matmul(&centred.transpose(-1, -2)).square()
    } else {
        k.matmul(&centred.transpose(-1, -2).matmul(&centred)) * &k
    };
    let spread = squares.sum_dim_intlist(&[-1i64][..], false, Kind::Float) / (2 * n) as f64;
    let logit = k.matmul(&mean.transpose(-1, -2)).squeeze_dim(-1) + spread;
    let logit = logit.masked_fill(&held_bgc.logical_not().unsqueeze(2), f64::from(f32::MIN));
    logit.softmax(-1, Kind::Float).mean_dim(&[2i64][..], false, Kind::Float).view([b, g, slots])
}
