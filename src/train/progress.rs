//! How far a run has come, as its checkpoints say, and which of its steps were left out, as they came to nothing finite; and where
//! the run's directory has all this.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::checkpoint::{self, Best};
use crate::recipe::{OnNonFinite, TrainRecipe};
use crate::report::console;
use crate::units::{Fault, FaultKind};

#[derive(Default)]
pub(super) struct RunProgress {
    /// Steps that are made or left out.
    pub(super) step: u64,
    pub(super) total_tokens: u64,
    pub(super) best: Option<Best>,
    /// The steps that were left out, counted from 1.
    pub(super) skipped: BTreeSet<u64>,
    /// Whether the validation after the last step was given up.
    pub(super) owes_validation: bool,
    /// Lines of metrics that an earlier version wrote; `None` while nobody has counted them.
    pub(super) unchecked_metrics: Option<u64>,
}

impl RunProgress {
    /// The step that an error lost is left out from now on, where the recipe's way of it is `way` and not too many before it were.
    ///
    /// # Errors
    /// The error, where it is another or the run has to end with it.
    pub(super) fn leave_out(&mut self, error: Fault, way: OnNonFinite, recipe: &TrainRecipe) -> Result<u64, Fault> {
        let FaultKind::NotFinite { step } = error.kind() else { return Err(error) };
        let in_a_row = (1..step).rev().take_while(|before| self.skipped.contains(before)).count();
        if recipe.on_non_finite != way || in_a_row >= recipe.max_skipped_steps {
            return Err(error);
        }
        self.skipped.insert(step);
        Ok(step)
    }
}

pub const RESOLVED_RECIPE: &str = "recipe.resolved.toml";

/// The newest whole checkpoint of a run. What is newer and not whole is told, and set aside where it is damaged.
pub(super) fn newest(run: &Path) -> Result<PathBuf, Fault> {
    let found = checkpoint::newest(run)?;
    let places = checkpoint::set_aside(run, &found)?;
    for (dir, why) in &found.skipped {
        let place = places.iter().find(|(from, _)| from == dir).map(|(_, place)| format!("; it is now `{}`", place.display()));
        console::warning(&format!("skipped `{}`: {why}{}", dir.display(), place.unwrap_or_default()));
    }
    Ok(found.dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_in_a_row_as_the_recipe_allows() {
        let text = "model.path = '.'\ndata = {format = 'tokens', train = 't'}\nkv_cache = {cache_length = 8, chunk_size = 4}\n\
                    train = {on_non_finite = 'skip', max_skipped_steps = 2}";
        let recipe = crate::recipe::Recipe::parse(text.to_owned(), "r.toml".as_ref(), &[]).unwrap().recipe.train;
        let lost = |step| super::super::step::loss_too_high(step, 9.0, 8.0);
        let mut progress = RunProgress::default();
        let mut leave_out = |step| progress.leave_out(lost(step), OnNonFinite::Skip, &recipe).ok();
        assert_eq!([3, 4, 5, 6, 9].map(&mut leave_out), [Some(3), Some(4), None, Some(6), Some(9)]);
        assert_eq!(progress.skipped, BTreeSet::from([3, 4, 6, 9]));
        assert!(progress.leave_out(lost(10), OnNonFinite::Rollback, &recipe).is_err(), "another way");
        assert!(progress.leave_out(Fault::usage("x", "y"), OnNonFinite::Skip, &recipe).is_err(), "another error");
    }
}
