//! The steps of a run that were left out, as they came to nothing finite, and whether one more may be.

use std::collections::BTreeSet;

use crate::recipe::{OnNonFinite, TrainRecipe};
use crate::units::{Fault, FaultKind};

/// The steps that were left out, counted from 1.
#[derive(Debug, Default)]
pub(super) struct SkippedSteps(BTreeSet<u64>);

impl SkippedSteps {
    pub(super) fn contains(&self, step: u64) -> bool {
        self.0.contains(&step)
    }

    pub(super) fn to_vec(&self) -> Vec<u64> {
        self.0.iter().copied().collect()
    }

    /// With those that a checkpoint knows of.
    pub(super) fn add(&mut self, saved: &[u64]) {
        self.0.extend(saved);
    }

    /// The step that an error lost is left out from now on, where the recipe's way of it is `way` and not too many before it were.
    ///
    /// # Errors
    /// The error, where it is another or the run has to end with it.
    pub(super) fn leave_out(&mut self, error: Fault, way: OnNonFinite, recipe: &TrainRecipe) -> Result<u64, Fault> {
        let FaultKind::NotFinite { step } = error.kind() else { return Err(error) };
        if recipe.on_non_finite != way {
            return Err(error);
        }
        let in_a_row = (1..step).rev().take_while(|before| self.contains(*before)).count();
        if in_a_row >= recipe.max_skipped_steps {
            return Err(error);
        }
        self.0.insert(step);
        Ok(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Fault;

    #[test]
    fn as_many_in_a_row_as_the_recipe_allows() {
        let text = "model.path = '.'\ndata = {format = 'tokens', train = 't'}\nkv_cache = {cache_length = 8, chunk_size = 4}\n\
                    train = {on_non_finite = 'skip', max_skipped_steps = 2}";
        let recipe = crate::recipe::Recipe::parse(text.to_owned(), "r.toml".as_ref(), &[]).unwrap().recipe.train;
        let lost = |step| super::super::step::loss_too_high(step, 9.0, 8.0);
        let mut skipped = SkippedSteps::default();
        let mut leave_out = |step| skipped.leave_out(lost(step), OnNonFinite::Skip, &recipe).ok();
        assert_eq!([3, 4, 5, 6, 9].map(&mut leave_out), [Some(3), Some(4), None, Some(6), Some(9)]);
        assert_eq!(skipped.to_vec(), [3, 4, 6, 9]);
        assert!(skipped.leave_out(lost(10), OnNonFinite::Rollback, &recipe).is_err(), "another way");
        assert!(skipped.leave_out(Fault::usage("x", "y"), OnNonFinite::Skip, &recipe).is_err(), "another error");
    }
}
