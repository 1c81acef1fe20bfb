//! `lagkv`: tokens whose keys and values spread unlike those that follow stay (LagKV, Liang et al. 2025, arXiv 2504.04704). Tokens stand in
//! partitions of `lag_size`; when the next partition is there, each channel is scaled by its least and largest value in that one, and the
//! score of a token is how much its channels then differ, as a rank in its partition. Departs from the paper in that a fixed cache
//! compares the ranks of all partitions, once they are known, instead of cutting each partition to the same share. Ranks say nothing of one
//! head beside another.

use serde::Deserialize;
use tch::{Kind, Tensor};

use super::params::{STREAMING_LLM_SINKS, staying};
use crate::cache::{Observed, Policy, PolicyTraits};
use crate::ops::attention::accumulation_kind;
use crate::recipe::PolicyRecipe;
use crate::units::Fault;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LagkvParams {
    lag_size: Option<usize>,
    #[serde(alias = "sink_tokens")]
    init_grace_tokens: Option<usize>,
}

/// The partition of the paper, in tokens.
const LAG: usize = 128;

#[derive(Debug)]
struct Lagkv {
    lag: usize,
    sinks: usize,
}

pub(super) fn build(recipe: &PolicyRecipe, cache_length: usize) -> Result<Box<dyn Policy>, Fault> {
    let params: LagkvParams = recipe.params()?;
    let lag = params.lag_size.unwrap_or_else(|| (cache_length / 8).clamp(1, LAG));
    if lag == 0 {
        let message = "`lag_size` = 0 is no partition".to_owned();
        return Err(recipe.reject(Some("lag_size"), message, "choose at least 1".into()));
    }
    let most = cache_length.saturating_sub(1) / 2;
    if lag > most {
        let message = format!("`lag_size` = {lag}: two partitions leave no slot to evict, `cache_length` is {cache_length}");
        return Err(recipe.reject(Some("lag_size"), message, format!("choose at most {most}")));
    }
    let sinks = params.init_grace_tokens.unwrap_or(STREAMING_LLM_SINKS);
    let sinks = staying(recipe, "init_grace_tokens", sinks, cache_length)?;
    Ok(Box::new(Lagkv { lag, sinks }))
}

impl Policy for Lagkv {
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
        let (k_bgcd, v_bgcd) = seen.attention.entries();
        let order_bgc = seen.position_bgc.argsort(-1, false);
        let filled = order_bgc.size()[2];
        Some((before..now).fold(known, |known, partition| {
            let first = self.sinks + partition * self.lag;
            // Nothing since the partition has left, so that it stands so far from the end of all heads that go on.
            let slots = order_bgc.narrow(2, filled - (seen.next_position - first) as i64, 2 * self.lag as i64);
            let position = Tensor::arange_start(first as i64, (first + 2 * self.lag) as i64, (Kind::Int64, slots.device()));
            let continues = seen.position_bgc.gather(2, &slots, false).eq_tensor(&position).all_dim(-1, true);
            let score = spread(&k_bgcd, &slots) + spread(&v_bgcd, &slots);
            let own = slots.narrow(2, 0, self.lag as i64);
            // In the order of positions: of equal scores the older ranks lower.
            let rank = score.argsort_stable(true, -1, false).argsort(-1, false) + 1;
            let rank = rank.to_kind(Kind::Float) / self.lag as f64;
            known.scatter(2, &own, &rank.where_self(&continues, &known.gather(2, &own, false)))
        }))
    }
}

/// How much the channels of each entry of a partition differ, scaled by the range that they have in the next one; the softmax over the
/// partition. A channel that is the same all over the next partition is only shifted. The slots are those of both partitions
/// `(B, G, 2 · lag)`; `(B, G, lag)` out, f64.
fn spread(x_bgcd: &Tensor, slots: &Tensor) -> Tensor {
    let (b, g, _, d) = x_bgcd.size4().unwrap_or_default();
    let both = x_bgcd.gather(2, &slots.unsqueeze(-1).expand([b, g, -1, d], false), false);
    // Deviations of many tokens lie close together.
    let both = both.to_kind(accumulation_kind(both.kind()));
    let parts = both.chunk(2, 2);
    let (own, next) = (&parts[0], &parts[1]);
    let low = next.amin([2i64], true);
    let range = next.amax([2i64], true) - &low;
    let scaled = (own - low) / range.where_self(&range.gt(0.0), &range.ones_like());
    scaled.std_dim(&[-1i64][..], true, false).softmax(-1, Kind::Double)
}
