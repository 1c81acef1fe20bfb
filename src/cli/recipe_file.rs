//! The recipe of verbs that look at a training run without making one: as it stands, or as `finetune-full` would have it.

use std::path::PathBuf;

use clap::Args;
use tch::Device;

use crate::recipe::{Recipe, RecipeError, Weights};
use crate::report::console;
use crate::train;

// No documentation of its own: clap would take it for that of the verb.
#[derive(Debug, Args)]
pub(super) struct RecipeFile {
    /// The recipe.
    #[arg(long, value_name = "FILE")]
    recipe: PathBuf,
    /// Override a key of the recipe.
    #[arg(long = "set", value_name = "a.b=c")]
    set: Vec<String>,
    /// As for `finetune-full`: all weights are trained, and there is no adapter.
    #[arg(long)]
    full: bool,
}

impl RecipeFile {
    /// Loads it, says what there is to note about it, and has `device` compute as it wants.
    pub(super) fn load(&self, device: Device) -> Result<Recipe, RecipeError> {
        let resolved = if self.full {
            Recipe::load_to_train(&self.recipe, &self.set, Weights::All)?
        } else {
            Recipe::load(&self.recipe, &self.set)?
        };
        resolved.notes.iter().for_each(|note| console::note(note));
        train::set_numerics(&resolved.recipe, device);
        Ok(resolved.recipe)
    }
}
