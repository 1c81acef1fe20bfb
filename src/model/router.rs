//! A layer's router: what it says of tokens, and which experts it prefers.

use tch::{Kind, Tensor, no_grad};

use super::linear::Linear;
use super::names::layer_tensor;
use super::norm::scaled;
use super::positions::TokenContext;
use super::spec::{ExpertsSpec, Preference};
use super::weights::Weights;
use crate::ops::attention::accumulation_kind;
use crate::units::{Fault, LayerIdx};

#[derive(Debug)]
pub(super) struct Router {
    pub(super) linear: Linear,
    preference: Preference,
    /// k, experts of a token.
    pub(super) top_k: usize,
    is_renormalised: bool,
    weight_scale: f64,
    /// What a router with [`Preference::Sigmoid`] adds for the choice.
    pub(super) correction_x: Option<Tensor>,
}

impl Router {
    pub(super) fn load(weights: &Weights, layer: LayerIdx, spec: &ExpertsSpec, hidden: usize) -> Result<Self, Fault> {
        let linear = Linear::load(weights, layer, &spec.router(hidden), spec.has_wide_router())?;
        let correction = spec.correction().map(|path| weights.load_wide(&layer_tensor(layer.0, &path)));
        Ok(Self {
            linear,
            preference: spec.preference,
            top_k: spec.top_k,
            is_renormalised: spec.is_renormalised,
            weight_scale: spec.weight_scale,
            correction_x: correction.transpose()?,
        })
    }

    /// The probability of each expert.
    ///
    /// # Shapes
    /// `(B, n, E)` in, `(B, n, X)` in the accumulation kind out.
    pub(super) fn probabilities(&self, x_bne: &Tensor, tokens: &TokenContext<'_>) -> Tensor {
        let kind = accumulation_kind(x_bne.kind());
        match self.preference {
            Preference::Softmax => self.linear.forward(x_bne, tokens).softmax(-1, kind),
            // Published models of this kind compute the scores in f32 already.
            Preference::Sigmoid { .. } => self.linear.forward(&x_bne.to_kind(kind), tokens).sigmoid(),
        }
    }

    /// The experts that each token prefers.
    ///
    /// # Shapes
    /// `(B, n, X)` in, `(B, n, k)` int64 out.
    pub(super) fn choose(&self, probability_bnx: &Tensor) -> Tensor {
        no_grad(|| {
            let corrected = self.correction_x.as_ref().map(|correction_x| probability_bnx + correction_x);
            let preferred_bnx = match self.preference {
                Preference::Sigmoid { groups, kept } => of_groups(&corrected.unwrap_or_default(), groups as i64, kept as i64),
                Preference::Softmax => probability_bnx.shallow_clone(),
            };
            preferred_bnx.topk(self.top_k as i64, -1, true, true).1
        })
    }

    /// The weights of the experts that were chosen.
    ///
    /// # Shapes
    /// `(B, n, X)` and `(B, n, k)` in, `(B, n, k)` out.
    pub(super) fn weights(&self, probability_bnx: &Tensor, chosen_bnk: &Tensor) -> Tensor {
        let mut weight_bnk = probability_bnx.gather(-1, chosen_bnk, false);
        if self.is_renormalised {
            // The least is nothing beside a sum of softmax; sigmoids may all be 0.
            weight_bnk = &weight_bnk / (weight_bnk.sum_dim_intlist(&[-1i64][..], true, weight_bnk.kind()) + 1e-20);
        }
        scaled(weight_bnk, self.weight_scale)
    }
}

/// Scores with 0 for experts outside of the groups that are kept, as published models were run; below it, a score of a group that is kept
/// is less.
fn of_groups(score_bnx: &Tensor, groups: i64, kept: i64) -> Tensor {
    if groups == kept {
        return score_bnx.shallow_clone();
    }
    let [b, n, experts] = <[i64; 3]>::try_from(score_bnx.size()).unwrap_or_default();
    let by_group = score_bnx.view([b, n, groups, experts / groups]);
    let best_two = by_group.topk(2, -1, true, false).0.sum_dim_intlist(&[-1i64][..], false, score_bnx.kind());
    let is_kept = best_two.zeros_like().to_kind(Kind::Bool).scatter_value(-1, &best_two.topk(kept, -1, true, false).1, 1);
    by_group.masked_fill(&is_kept.logical_not().unsqueeze(-1), 0.0).view([b, n, experts])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As Transformers 5.3 has it: an expert of a group that is dropped has a score of 0, not none.
    #[test]
    fn experts_of_groups_that_are_dropped_have_a_score_of_zero() {
        let of = |scores: &[f64], groups, kept| {
            let score_bnx = Tensor::from_slice(scores).view([1, 1, -1]);
            Vec::<f64>::try_from(of_groups(&score_bnx, groups, kept).view([-1])).unwrap()
        };
        // The best expert of all stands in a group whose best two are worth least.
        let scores = [0.9, -0.5, 0.4, 0.3, 0.35, 0.3, 0.1, 0.6];
        assert_eq!(of(&scores, 4, 2), [0.0, 0.0, 0.4, 0.3, 0.0, 0.0, 0.1, 0.6]);
        assert_eq!(of(&scores, 2, 1), [0.9, -0.5, 0.4, 0.3, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(of(&scores, 1, 1), scores);
    }
}
