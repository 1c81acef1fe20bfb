//! `h2o`: heavy hitters stay. The score is the attention paid to an entry so far (Zhang et al. 2023, arXiv 2306.14048). Departs from
//! the paper in that each row and KV head decides for itself, recent tokens are protected only as far as `grace_period` says, and the
//! prefill span is scored only if `score_prefill` says so; before there are scores, a part of the first tokens stays.

use super::heavy_hitters::{HeavyHitters, Params};
use crate::cache::{CacheError, Entries, Observed, Policy, Score};
use crate::recipe::Choice;

#[derive(Debug)]
struct H2o(HeavyHitters);

pub(super) fn build(choice: &Choice, cache_length: usize) -> Result<Box<dyn Policy>, CacheError> {
    let params: Params = choice.params()?;
    Ok(Box::new(H2o(HeavyHitters::new(choice, &params, cache_length)?)))
}

impl Policy for H2o {
    fn score(&self, entries: &Entries<'_>) -> Score {
        self.0.order(entries, |score| score)
    }

    fn grace(&self) -> usize {
        self.0.grace
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<tch::Tensor> {
        self.0.add(seen, || seen.attention.paid(None))
    }

    fn compares_heads(&self) -> bool {
        self.0.scores_early()
    }
}
