//! `h2o`, `h2o-orig`, `h2o-vlen`, `qh2o` and `qh2o-vlen`: heavy hitters stay. Scores add up over the chunks.
//!
//! The score of `h2o` is the attention mass of an entry so far (Zhang et al. 2023, arXiv 2306.14048). It departs from the paper: each
//! sequence and KV head decides for itself; recent tokens are protected only as far as `grace_period` says; the prefill span is scored
//! only if `score_prefill` says so, and before there are scores, a part of the first tokens stays. `h2o-vlen` weights attention with the
//! norm of the value, so that it counts for as much as it moves the output. `h2o-orig` sums attention over the sequences of the batch too, as
//! published, so that all sequences lose the same tokens; it departs from the paper in having no half of the cache reserved for recent
//! tokens, and in what `h2o` says of the prefill span. Under `qh2o` and `qh2o-vlen`, which need a quantised buffer,
//! an entry that suffers from quantisation leaves earlier.

use serde::Deserialize;
use tch::{Kind, Tensor};

use super::params::{GracePeriod, fraction};
use crate::cache::{Entries, EvictionOrder, NewEntries, Observed, Policy, PolicyTraits, Queries};
use crate::ops::head_vectors::norms;
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct HeavyHittersParams {
    grace_period: GracePeriod,
    keep_initial_fraction: Option<f64>,
    /// Whether a score is divided by the number of queries that gave it.
    normalize_scores: bool,
    /// Whether one scoring query too many counts for tokens of the prefill span, as in the reference implementation.
    reference_counts: bool,
    score_prefill: bool,
}

/// The parameters of `h2o-orig`: fewer, as it has no grace period.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct H2oOrigParams {
    keep_initial_fraction: Option<f64>,
    score_prefill: bool,
}

/// The parameters of `qh2o` and `qh2o-vlen`: the same, and how much the attention mass weighs beside the error of quantisation.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Qh2oParams {
    grace_period: GracePeriod,
    keep_initial_fraction: Option<f64>,
    normalize_scores: bool,
    reference_counts: bool,
    score_prefill: bool,
    combination_constant: Option<f64>,
}

pub(super) fn h2o(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    HeavyHitters::build(recipe, &recipe.params()?, cache_length, Gives::Attention, None)
}

pub(super) fn h2o_vlen(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    HeavyHitters::build(recipe, &recipe.params()?, cache_length, Gives::ValueWeighted, None)
}

pub(super) fn h2o_orig(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    let H2oOrigParams { keep_initial_fraction, score_prefill } = recipe.params()?;
    let params = HeavyHittersParams { keep_initial_fraction, score_prefill, ..HeavyHittersParams::default() };
    HeavyHitters::build(recipe, &params, cache_length, Gives::BatchAttention, None)
}

pub(super) fn qh2o(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    beside_error(recipe, cache_length, Gives::Attention)
}

pub(super) fn qh2o_vlen(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    beside_error(recipe, cache_length, Gives::ValueWeighted)
}

fn beside_error(recipe: &PolicyRecipe, cache_length: usize, gives: Gives) -> Result<Box<dyn Policy>, Fault> {
    let p: Qh2oParams = recipe.params()?;
    let params = HeavyHittersParams {
        grace_period: p.grace_period,
        keep_initial_fraction: p.keep_initial_fraction,
        normalize_scores: p.normalize_scores,
        reference_counts: p.reference_counts,
        score_prefill: p.score_prefill,
    };
    let attention = fraction(recipe, "combination_constant", p.combination_constant.unwrap_or(0.5))?;
    HeavyHitters::build(recipe, &params, cache_length, gives, Some(attention))
}

/// What a query gives to an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gives {
    Attention,
    /// The attention that a position gets in all sequences of the batch.
    BatchAttention,
    /// The attention weight times the norm of the value.
    ValueWeighted,
}

/// A policy whose scores add up: attention mass, plain or weighted with the norms of values, and the error of quantisation if that counts.
#[derive(Debug)]
struct HeavyHitters {
    grace: usize,
    /// The fraction of the cache length whose first tokens stay at an eviction before anything has been scored.
    keep_initial: f64,
    normalize_scores: bool,
    reference_counts: bool,
    score_prefill: bool,
    gives: Gives,
    /// The weight of attention in the score; the rest goes to the error of quantisation. `None` leaves that error out.
    beside_error: Option<f64>,
}

impl HeavyHitters {
    fn build(
        recipe: &PolicyRecipe,
        params: &HeavyHittersParams,
        cache_length: usize,
        gives: Gives,
        beside_error: Option<f64>,
    ) -> Result<Box<dyn Policy>, Fault> {
        if params.reference_counts && params.score_prefill {
            let message =
                "`reference_counts` contradicts `score_prefill`: the reference does not score the prefill span".to_owned();
            return Err(recipe.reject(Some("reference_counts"), message, "remove one of them".into()));
        }
        Ok(Box::new(Self {
            grace: params.grace_period.tokens(recipe, cache_length)?,
            keep_initial: fraction(recipe, "keep_initial_fraction", params.keep_initial_fraction.unwrap_or(0.05))?,
            normalize_scores: params.normalize_scores,
            reference_counts: params.reference_counts,
            score_prefill: params.score_prefill,
            gives,
            beside_error,
        }))
    }

    /// Number of queries that have scored each entry: those since it was written, the prefill span's if they count.
    fn num_scorers(&self, entries: &Entries<'_>) -> Tensor {
        let first = if self.score_prefill { 0 } else { entries.prefill as i64 - i64::from(self.reference_counts) };
        (entries.next_position as i64 - entries.position_bgc.clamp_min(first)).to_kind(Kind::Float)
    }
}

impl Policy for HeavyHitters {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        let Some(score_bgc) = entries.observed_bgc else {
            // Nothing has been scored: the first tokens stay, the next oldest leave.
            let keep_first = (self.keep_initial * entries.capacity as f64) as usize;
            return EvictionOrder::ByPosition { keep_first };
        };
        let score_bgc = if self.normalize_scores { score_bgc / self.num_scorers(entries) } else { score_bgc.shallow_clone() };
        // The last of what `describe` said.
        let index = i64::from(self.gives == Gives::ValueWeighted);
        match self.beside_error.and_then(|a| Some((a, entries.feature(index)?))) {
            Some((a, error)) => EvictionOrder::ByEntry(with_error(&score_bgc, &error, &entries.candidates(self), a)),
            None => EvictionOrder::ByEntry(score_bgc),
        }
    }

    fn traits(&self) -> PolicyTraits<'_> {
        PolicyTraits {
            grace: self.grace,
            prefill_queries: self.score_prefill.then_some(Queries::All),
            chunk_queries: Some(Queries::All),
            // Only if there are scores at the first eviction.
            compares_heads: self.score_prefill,
            needs_quantised: self.beside_error.is_some(),
            couples_sequences: self.gives == Gives::BatchAttention,
            ..PolicyTraits::default()
        }
    }

    fn describe(&self, new: &NewEntries<'_>) -> Vec<Tensor> {
        let value = (self.gives == Gives::ValueWeighted).then(|| norm(new.v_bgnd));
        let error = self.beside_error.map(|_| quantisation_error(new));
        value.into_iter().chain(error).collect()
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        let given = || match self.gives {
            Gives::Attention => seen.attention.mass(Queries::All),
            Gives::BatchAttention => summed_over_sequences(seen.attention.mass(Queries::All).to_kind(Kind::Float), seen),
            Gives::ValueWeighted => value_weighted(seen),
        };
        (self.score_prefill || !seen.is_prefill).then(|| seen.plus(given()))
    }
}

/// The Euclidean norm of each head vector `(B, G, n)`, f32.
pub(super) fn norm(x_bgnd: &Tensor) -> Tensor {
    norms(x_bgnd).to_kind(Kind::Float)
}

/// What mass each entry's position has in all sequences: in another slot, where a sequence ends in the chunk.
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

/// Attention mass times the norm of the value (feature 0), scaled so that a chunk of `n` queries gives `n` to all entries together.
fn value_weighted(seen: &Observed<'_>) -> Tensor {
    let mass = seen.attention.mass(Queries::All).to_kind(Kind::Float);
    let weighted = match seen.feature(0) {
        Some(norm) => mass * norm,
        None => mass,
    };
    // A sequence without queries has no attention mass, and its sum is 0.
    let sum = weighted.sum_dim_intlist(&[2i64][..], true, Kind::Float).clamp_min(f64::from(f32::MIN_POSITIVE));
    weighted * (seen.num_queries as f64) / sum
}

/// How quantisation enters the score: `a · mm(score) − (1 − a)/2 · mm(error) + (1 − a)`, where `mm` maps to 0..1 over the candidates
/// of a sequence, and what is constant to 0.
fn with_error(score_bgc: &Tensor, error_bgc: &Tensor, candidates: &Tensor, a: f64) -> Tensor {
    let others = candidates.logical_not();
    let unit = |x: &Tensor| {
        let low = x.masked_fill(&others, f64::INFINITY).amin([1i64, 2], true);
        let high = x.masked_fill(&others, f64::NEG_INFINITY).amax([1i64, 2], true);
        (x - &low) / (high - &low).clamp_min(f64::from(f32::MIN_POSITIVE))
    };
    unit(score_bgc) * a + unit(error_bgc) * ((a - 1.0) / 2.0) + (1.0 - a)
}

/// What quantisation costs an entry: the norms of the errors of key and value `(B, G, n)`.
fn quantisation_error(new: &NewEntries<'_>) -> Tensor {
    let (k, v) = new.stored();
    norm(&(k - new.k_bgnd)) + norm(&(v - new.v_bgnd))
}
