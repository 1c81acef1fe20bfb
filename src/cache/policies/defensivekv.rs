//! `defensivekv`: the worst that the loss of an entry did to any of the last few queries counts, and not the mean (`DefensiveKV`, Feng et
//! al. 2025, arXiv 2510.13334). Of each query and query head the attention weights are pooled over neighbours; an entry's risk is the
//! largest of them, at least the mean risk of all, times its part of `‖v W_O‖₁` (`CriticalKV`, arXiv 2502.03805). Entries that together
//! with the window get 0.9 of the attention leave last, as in `CriticalKV`'s first stage. `adakv` around it, over all layers, is
//! `Layer-DefensiveKV`. Departs from the paper in that it decides anew for each chunk, and that neighbours are those still held.

use tch::{Kind, Tensor};

use super::window::{Pooling, pooled, window_and_kernel};
use crate::cache::{Observed, Policy, PolicyTraits};
use crate::ops::attention::ModelFeature;
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

/// The kernel of the paper's code.
const KERNEL: usize = 5;
/// The part of the attention that the entries of the first stage and the window get together.
const FIRST_STAGE: f64 = 0.9;

#[derive(Debug)]
struct Defensivekv {
    window: usize,
    kernel: usize,
}

pub(super) fn build(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    let [window, kernel] = window_and_kernel(recipe, cache_length, KERNEL)?;
    Ok(Box::new(Defensivekv { window, kernel }))
}

impl Policy for Defensivekv {
    fn traits(&self) -> PolicyTraits<'_> {
        // The window itself stays.
        PolicyTraits {
            grace: self.window,
            compares_heads: true,
            model_feature: Some(ModelFeature::OutputNorm),
            ..PolicyTraits::default()
        }
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        let norm_bgc = seen.feature(0)?;
        let is_old = seen.position_bgc.ge(0).logical_and(&seen.position_bgc.lt(seen.next_position as i64 - self.window as i64));
        let weight_bhwc = seen.attention.weights(self.window).to_kind(Kind::Double);
        let groups = norm_bgc.size()[1];
        let rows_bgrc = weight_bhwc.unflatten(1, [groups, -1]).flatten(2, 3);
        Some(self.risk(&rows_bgrc, &norm_bgc.to_kind(Kind::Double), &is_old, seen.position_bgc).to_kind(Kind::Float))
    }
}

impl Defensivekv {
    /// What the loss of each entry that `is_old` would do at worst; the others stay anyway.
    ///
    /// # Shapes
    /// `rows (B, G, R, C)`: attention weights by query and query head; `norm`, `is_old` and `position (B, G, C)`, which is that of the
    /// result. All f64 but `is_old`, bool, and `position`, i64.
    fn risk(&self, rows_bgrc: &Tensor, norm_bgc: &Tensor, is_old: &Tensor, position_bgc: &Tensor) -> Tensor {
        let total = |x: &Tensor| x.sum_dim_intlist(&[-1i64][..], true, Kind::Double);
        let part = |x: &Tensor| x / total(x).clamp_min(f64::MIN_POSITIVE);
        let old = rows_bgrc.where_scalarother(&is_old.unsqueeze(2), 0.0);
        let position = position_bgc.where_scalarother(is_old, -1).unsqueeze(2);
        // Pooling moves attention to neighbours, and a row keeps what it had.
        let near = pooled(&old, &position, self.kernel, Pooling::Mean).to_kind(Kind::Double);
        let near = part(&near.where_scalarother(&is_old.unsqueeze(2), 0.0)) * total(&old);
        let worst = near.amax([2i64], false);
        let mean = total(&worst) / total(&is_old.to_kind(Kind::Double)).clamp_min(1.0);
        let risk = (worst.maximum(&mean) * part(&norm_bgc.where_scalarother(is_old, 0.0))).where_scalarother(is_old, 0.0);
        // The first stage: by the mean of the rows, as far as the window leaves something of 0.9.
        let mass = old.sum_dim_intlist(&[2i64][..], false, Kind::Double);
        let all = rows_bgrc.sum_dim_intlist(&[2i64, 3][..], false, Kind::Double).unsqueeze(-1);
        let share = mass / all.clamp_min(f64::MIN_POSITIVE);
        let (sorted, order) = share.sort(-1, true);
        // What is not theirs is the window's.
        let short_of_all = sorted.cumsum(-1, Kind::Double) - total(&share);
        let is_first = is_old.zeros_like().scatter(-1, &order, &short_of_all.lt(FIRST_STAGE - 1.0)).logical_and(is_old);
        // A risk is at most 1, in every layer.
        risk + is_first.to_kind(Kind::Double)
    }
}
