//! `lagkv`: tokens whose keys and values spread unlike those that follow stay (LagKV, Liang et al. 2025, arXiv 2504.04704). Tokens stand in
//! partitions of `lag_size`; when the next partition is there, each channel is scaled by its least and largest value in that one, and the
//! score of a token is how much its channels then differ, as a rank in its partition. Departs from the paper in that a fixed cache
//! compares the ranks of all partitions, once they are known, instead of cutting each partition to the same share. Ranks say nothing of one
//! head beside another.

use serde::Deserialize;
use tch::{Kind, Tensor};

use super::params::{default_sinks, staying};
use crate::cache::{Entries, EvictionOrder, Observed, Policy, PolicyTraits};
use crate::ops::attention::accumulation_kind;
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LagkvParams {
    lag_size: Option<usize>,
    #[serde(default = "default_sinks", alias = "sink_tokens")]
    init_grace_tokens: usize,
}

/// The partition of the paper, in tokens.
const LAG: usize = 128;

#[derive(Debug)]
struct Lagkv {
    lag: usize,
    sinks: usize,
}

pub(super) fn build(choice: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    let params: LagkvParams = choice.params()?;
    let lag = params.lag_size.unwrap_or_else(|| (cache_length / 8).clamp(1, LAG));
    if lag == 0 {
        return Err(choice
            .reject(Some("lag_size"), "`lag_size` = 0 is no partition".to_owned(), "choose at least 1".into())
            .into());
    }
    staying(choice, "lag_size", lag.saturating_mul(2), cache_length)?;
    let sinks = staying(choice, "init_grace_tokens", params.init_grace_tokens, cache_length)?;
    Ok(Box::new(Lagkv { lag, sinks }))
}

impl Policy for Lagkv {
    fn score(&self, entries: &Entries<'_>) -> EvictionOrder {
        EvictionOrder::by_score(entries.observed_bgc.map(Tensor::shallow_clone))
    }

    fn traits(&self) -> PolicyTraits<'_> {
        // What has no score yet stays: a whole partition that waits for the next one, and that one.
        PolicyTraits { grace: 2 * self.lag, sinks: self.sinks, ..PolicyTraits::default() }
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        // The partitions whose next one is complete, now and before the chunk.
        let complete = |next: usize| (next.saturating_sub(self.sinks) / self.lag).saturating_sub(1);
        let (before, now) = (complete(seen.next_position - seen.num_queries), complete(seen.next_position));
        let known = seen.previous_bgc.map_or_else(|| seen.position_bgc.zeros_like().to_kind(Kind::Float), Tensor::shallow_clone);
        if before == now {
            return Some(known);
        }
        // Deviations of many tokens lie close together.
        let (k_bgcd, v_bgcd) = seen.attention.entries();
        let [k_bgcd, v_bgcd] = [k_bgcd, v_bgcd].map(|x| x.to_kind(accumulation_kind(x.kind())));
        Some((before..now).fold(known, |known, partition| {
            let first = self.sinks + partition * self.lag;
            let within = |first: usize| {
                let end = (first + self.lag) as i64;
                seen.position_bgc.ge(first as i64).logical_and(&seen.position_bgc.lt(end))
            };
            let (own, next) = (within(first), within(first + self.lag));
            let score = spread(&k_bgcd, &own, &next) + spread(&v_bgcd, &own, &next);
            rank(&score, &own, seen.position_bgc, self.lag).where_self(&own, &known)
        }))
    }
}

/// How much the channels of each entry differ, scaled by the range that they have in the next partition; the softmax over its own. A
/// channel that is the same all over the next partition is only shifted.
///
/// # Shapes
/// `(B, G, C, D)` and twice `(B, G, C)`, bool, in, `(B, G, C)` out.
fn spread(x_bgcd: &Tensor, own: &Tensor, next: &Tensor) -> Tensor {
    let others = next.logical_not().unsqueeze(-1);
    let low = x_bgcd.masked_fill(&others, f64::INFINITY).amin([2i64], true);
    let range = x_bgcd.masked_fill(&others, f64::NEG_INFINITY).amax([2i64], true) - &low;
    let scaled = (x_bgcd - &low) / range.where_self(&range.gt(0.0), &range.ones_like());
    // Nothing stands in the next partition of a sequence that has ended, or here.
    let deviation = scaled.std_dim(&[-1i64][..], true, false).masked_fill(&own.logical_not(), f64::NEG_INFINITY);
    deviation.nan_to_num(0.0, 0.0, f64::from(f32::MIN)).softmax(-1, Kind::Double)
}

/// The rank of each score in its partition, in (0, 1]; of equal ones the older ranks lower.
///
/// # Shapes
/// `(B, G, C)` all, `own` bool, out f32.
fn rank(score: &Tensor, own: &Tensor, position_bgc: &Tensor, lag: usize) -> Tensor {
    let by_age = position_bgc.argsort(-1, false);
    let score = score.masked_fill(&own.logical_not(), -1.0).gather(2, &by_age, false);
    let order = score.argsort_stable(true, -1, false).argsort(-1, false);
    let others = own.logical_not().sum_dim_intlist(&[-1i64][..], true, Kind::Int64);
    let rank = (order - others + 1).to_kind(Kind::Float) / lag as f64;
    rank.zeros_like().scatter(2, &by_age, &rank)
}
