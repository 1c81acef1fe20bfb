//! `h2o-orig`: `h2o` as it was published (arXiv 2306.14048): attention is summed over the sequences of the batch too, so that all sequences lose
//! the same tokens. Departs from the paper in having no half of the cache reserved for recent tokens, and in what `h2o`
//! says of the prefill span.

use serde::Deserialize;
use tch::{Kind, Tensor};

use super::heavy_hitters::{self, HeavyHitters, default_keep};
use super::params::GracePeriod;
use crate::cache::{Entries, EvictionOrder, Observed, Policy, PolicyTraits, Queries};
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct H2oOrigParams {
    #[serde(default = "default_keep")]
    keep_initial_fraction: f64,
    #[serde(default)]
    score_prefill: bool,
}

#[derive(Debug)]
struct H2oOrig(HeavyHitters);

pub(super) fn build(choice: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    let H2oOrigParams { keep_initial_fraction, score_prefill } = choice.params()?;
    let params = heavy_hitters::HeavyHittersParams {
        grace_period: GracePeriod::default(),
        keep_initial_fraction,
        normalize_scores: false,
        reference_counts: false,
        score_prefill,
    };
    Ok(Box::new(H2oOrig(HeavyHitters::new(choice, &params, cache_length)?)))
}

impl Policy for H2oOrig {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        self.0.score(entries)
    }

    fn traits(&self) -> PolicyTraits<'_> {
        PolicyTraits { couples_sequences: true, ..self.0.traits() }
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        self.0.add(seen, || summed_over_sequences(seen.attention.mass(Queries::All).to_kind(Kind::Float), seen))
    }
}

/// For each entry, what mass its position has in all sequences. By position, not by slot: a sequence that ends in the chunk keeps its entries
/// elsewhere.
fn summed_over_sequences(mass_bgc: Tensor, seen: &Observed<'_>) -> Tensor {
    let (batch, groups, _) = mass_bgc.size3().unwrap_or_default();
    if batch == 1 {
        return mass_bgc;
    }
    let is_held = seen.position_bgc.ge(0);
    let (position, tokens) = (seen.position_bgc.clamp_min(0), seen.next_position as i64);
    let by_position = Tensor::zeros([batch, groups, tokens], (Kind::Float, mass_bgc.device()));
    let held = mass_bgc.where_self(&is_held, &mass_bgc.zeros_like());
    let total = by_position.scatter_add(2, &position, &held).sum_dim_intlist(&[0i64][..], true, Kind::Float);
    total.expand([batch, groups, tokens], false).gather(2, &position, false)
}
