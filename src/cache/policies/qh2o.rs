//! `qh2o`: as `h2o`, but an entry that suffers from quantisation leaves earlier. It needs a quantised buffer.

use tch::Tensor;

use super::heavy_hitters::{HeavyHitters, quantisation_error, with_error};
use super::qh2o_params::Params;
use crate::cache::{CacheError, Entries, NewEntries, Observed, Policy, Score};
use crate::recipe::Choice;

#[derive(Debug)]
struct Qh2o {
    hitters: HeavyHitters,
    /// The part of the attention in the score; the rest is the error's.
    attention: f64,
}

pub(super) fn build(choice: &Choice, cache_length: usize) -> Result<Box<dyn Policy>, CacheError> {
    let (hitters, attention) = Params::read(choice, cache_length)?;
    Ok(Box::new(Qh2o { hitters, attention }))
}

impl Policy for Qh2o {
    fn score(&self, entries: &Entries<'_>) -> Score {
        let weigh = |score: Tensor| match entries.feature(0) {
            Some(error) => with_error(&score, &error, entries, self.attention),
            None => score,
        };
        self.hitters.order(entries, weigh)
    }

    fn grace(&self) -> usize {
        self.hitters.grace
    }

    fn describe(&self, new: &NewEntries<'_>) -> Vec<Tensor> {
        vec![quantisation_error(new)]
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        self.hitters.add(seen, || seen.attention.paid(None))
    }

    fn needs_quantised(&self) -> bool {
        true
    }

    fn compares_heads(&self) -> bool {
        self.hitters.scores_early()
    }
}
