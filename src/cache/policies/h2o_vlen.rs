//! `h2o-vlen`: as `h2o`, but attention counts for as much as it moves the output: it is weighted with the norm of the value.

use tch::Tensor;

use super::heavy_hitters::{HeavyHitters, Params, norm, value_weighted};
use crate::cache::{CacheError, Entries, NewEntries, Observed, Policy, Score};
use crate::recipe::Choice;

#[derive(Debug)]
struct H2oVlen(HeavyHitters);

pub(super) fn build(choice: &Choice, cache_length: usize) -> Result<Box<dyn Policy>, CacheError> {
    let params: Params = choice.params()?;
    Ok(Box::new(H2oVlen(HeavyHitters::new(choice, &params, cache_length)?)))
}

impl Policy for H2oVlen {
    fn score(&self, entries: &Entries<'_>) -> Score {
        self.0.order(entries, |score| score)
    }

    fn grace(&self) -> usize {
        self.0.grace
    }

    fn describe(&self, new: &NewEntries<'_>) -> Vec<Tensor> {
        vec![norm(new.v_bgnd)]
    }

    fn observe(&self, seen: &Observed<'_>) -> Option<Tensor> {
        self.0.add(seen, || value_weighted(seen))
    }

    fn compares_heads(&self) -> bool {
        self.0.scores_early()
    }
}
