//! What the policies of the h2o family have in common: scores that add up over the chunks, and a rule for the time before there
//! are any.

use serde::Deserialize;
use tch::{Kind, Tensor};

use super::params::{fraction, staying};
use crate::cache::{CacheError, Entries, EvictionOrder, NewEntries, Observed, Policy, Queries};
use crate::ops::attention::accumulation_kind;
use crate::recipe::PolicyRecipe;

/// The parameters of the family.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HeavyHittersParams {
    #[serde(default)]
    pub(super) grace_period: usize,
    #[serde(default = "default_keep")]
    pub(super) keep_initial_fraction: f64,
    #[serde(default)]
    pub(super) normalize_scores: bool,
    #[serde(default)]
    pub(super) reference_counts: bool,
    #[serde(default)]
    pub(super) score_prefill: bool,
}

pub(super) fn default_keep() -> f64 {
    0.05
}

/// What a query gives to an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gives {
    /// Its attention.
    Attention,
    /// Its attention weighted with the norm of the value.
    ValueWeighted,
}

/// Scores that add up: attention as it was mass, or weighted with the norms of values, and what quantisation costs if that counts.
#[derive(Debug)]
pub(super) struct HeavyHitters {
    grace: usize,
    /// Of the cache: the first tokens that stay at an eviction before anything has been scored.
    keep_initial: f64,
    /// Whether a score is divided by the number of queries that gave it.
    normalize: bool,
    /// Count one scoring query too many for tokens of the prefill span, as the reference implementation does.
    reference_counts: bool,
    /// Whether the queries of the prefill span score too.
    score_prefill: bool,
    gives: Gives,
    /// The part of the attention in a score whose rest is the error of quantisation.
    beside_error: Option<f64>,
}

impl HeavyHitters {
    pub(super) fn new(choice: &PolicyRecipe, params: &HeavyHittersParams, cache_length: usize) -> Result<Self, CacheError> {
        if params.reference_counts && params.score_prefill {
            let message =
                "`reference_counts` contradicts `score_prefill`: the reference does not score the prefill span".to_owned();
            return Err(choice.reject(Some("reference_counts"), message, "remove one of them".into()).into());
        }
        Ok(Self {
            grace: staying(choice, "grace_period", params.grace_period, cache_length)?,
            keep_initial: fraction(choice, "keep_initial_fraction", params.keep_initial_fraction)?,
            normalize: params.normalize_scores,
            reference_counts: params.reference_counts,
            score_prefill: params.score_prefill,
            gives: Gives::Attention,
            beside_error: None,
        })
    }

    /// The same by attention weighted with the norms of values.
    pub(super) fn by_value(self) -> Self {
        Self { gives: Gives::ValueWeighted, ..self }
    }

    /// The same with the error of quantisation beside the attention, whose part is `attention`.
    pub(super) fn beside_error(self, attention: f64) -> Self {
        Self { beside_error: Some(attention), ..self }
    }

    /// Number of queries that have scored each entry: those since it was written, the prefill span's if they count.
    fn num_scorers(&self, entries: &Entries<'_>) -> Tensor {
        let first = if self.score_prefill { 0 } else { entries.prefill as i64 - i64::from(self.reference_counts) };
        (entries.next_position as i64 - entries.position_bgc.clamp_min(first)).to_kind(Kind::Float)
    }

    /// Adds what a chunk's queries give.
    pub(super) fn add(&self, seen: &Observed<'_>, given: impl FnOnce() -> Tensor) -> Option<Tensor> {
        (self.score_prefill || !seen.is_prefill).then(|| seen.plus(given()))
    }
}

impl Policy for HeavyHitters {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        let Some(score_bgc) = entries.observed_bgc else {
            // Nothing has been scored: the first tokens stay, the next oldest leave.
            let keep_first = (self.keep_initial * entries.cache_length as f64) as usize;
            return EvictionOrder::ByPosition { keep_first };
        };
        let score_bgc = if self.normalize { score_bgc / self.num_scorers(entries) } else { score_bgc.shallow_clone() };
        // The last of what `describe` said.
        let index = i64::from(self.gives == Gives::ValueWeighted);
        match self.beside_error.and_then(|a| Some((a, entries.feature(index)?))) {
            Some((a, error)) => EvictionOrder::ByEntry(with_error(&score_bgc, &error, entries, a)),
            None => EvictionOrder::ByEntry(score_bgc),
        }
    }

    fn grace(&self) -> usize {
        self.grace
    }

    fn describe(&self, new: &NewEntries<'_>) -> Vec<Tensor> {
        let value = (self.gives == Gives::ValueWeighted).then(|| norm(new.v_bgnd));
        let error = self.beside_error.map(|_| quantisation_error(new));
        value.into_iter().chain(error).collect()
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        self.add(seen, || match self.gives {
            Gives::Attention => seen.attention.mass(Queries::All),
            Gives::ValueWeighted => value_weighted(seen),
        })
    }

    fn required_queries(&self, is_prefill: bool) -> Option<Queries> {
        (self.score_prefill || !is_prefill).then_some(Queries::All)
    }

    fn needs_quantised(&self) -> bool {
        self.beside_error.is_some()
    }

    /// Only if there are scores at the first eviction.
    fn compares_heads(&self) -> bool {
        self.score_prefill
    }
}

/// The Euclidean norm of each head vector `(B, G, n)`, f32.
pub(super) fn norm(x_bgnd: &Tensor) -> Tensor {
    // In bf16 many norms would be the same.
    x_bgnd.to_kind(accumulation_kind(x_bgnd.kind())).norm_scalaropt_dim(2.0, [-1i64], false).to_kind(Kind::Float)
}

/// Attention mass times the norm of the value, scaled so that a chunk of `n` queries gives `n` to all entries together. The norm is
/// the entry's feature 0.
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
fn with_error(score_bgc: &Tensor, error_bgc: &Tensor, entries: &Entries<'_>, a: f64) -> Tensor {
    let others = entries.candidates().logical_not();
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
