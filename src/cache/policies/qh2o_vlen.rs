//! `qh2o-vlen`: as `h2o-vlen`, but an entry that suffers from quantisation leaves earlier. It needs a quantised buffer.

use tch::Tensor;

use super::heavy_hitters::{HeavyHitters, norm, quantisation_error, value_weighted, with_error};
use super::qh2o_params::Params;
use crate::cache::{CacheError, Entries, NewEntries, Observed, Policy, Score};
use crate::recipe::Choice;

#[derive(Debug)]
struct Qh2oVlen {
    hitters: HeavyHitters,
    /// The part of the attention in the score; the rest is the error's.
    attention: f64,
}

pub(super) fn build(choice: &Choice, cache_length: usize) -> Result<Box<dyn Policy>, CacheError> {
    let (hitters, attention) = Params::read(choice, cache_length)?;
    Ok(Box::new(Qh2oVlen { hitters, attention }))
}

impl Policy for Qh2oVlen {
    fn score(&self, entries: &Entries<'_>) -> Score {
        let weigh = |score: Tensor| match entries.feature(1) {
            Some(error) => with_error(&score, &error, entries, self.attention),
            None => score,
        };
        self.hitters.order(entries, weigh)
    }

    fn grace(&self) -> usize {
        self.hitters.grace
    }

    fn describe(&self, new: &NewEntries<'_>) -> Vec<Tensor> {
        vec![norm(new.v_bgnd), quantisation_error(new)]
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        self.hitters.add(seen, || value_weighted(seen))
    }

    fn needs_quantised(&self) -> bool {
        true
    }

    fn compares_heads(&self) -> bool {
        self.hitters.scores_early()
    }
}
