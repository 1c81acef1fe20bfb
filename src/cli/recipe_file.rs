//! The recipe of verbs that take one, by its place or by `--recipe`; as it stands, or as `finetune-full` would have it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use clap::Args;
use tch::Device;

use crate::recipe::{Recipe, Resolved, TrainedWeights};
use crate::report::console;
use crate::train;
use crate::units::Fault;

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(super) struct RecipePath {
    /// The recipe, a TOML file.
    #[arg(value_name = "RECIPE")]
    place: Option<PathBuf>,
    /// The recipe, instead of RECIPE.
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
}

impl RecipePath {
    /// Whether it is given without a word, and has none of the endings of recipes.
    pub(super) fn may_be_data(&self) -> bool {
        let is_ending = |ending: &OsStr| ["toml", "yaml", "yml"].iter().any(|known| ending == *known);
        self.place.as_ref().is_some_and(|path| !path.extension().is_some_and(is_ending))
    }

    /// The one that is given; clap lets neither and both pass nowhere but in verbs that do without.
    pub(super) fn path(&self) -> &Path {
        self.place.as_ref().or(self.recipe.as_ref()).map_or(Path::new(""), PathBuf::as_path)
    }
}

/// A recipe for a model and data of which no recipe is written yet; rows that are no samples, or too long, are counted and left out.
pub(super) fn recipe_for(model: &Path, data: &Path, set: &[String]) -> Result<Recipe, Fault> {
    let text = |path: &Path| toml::Value::from(path.display().to_string());
    let paths =
        format!("model.path = {}\ndata = {{ train = {}, on_bad_row = 'drop', on_too_long = 'drop' }}\n", text(model), text(data));
    Ok(Recipe::parse(paths, Path::new("recipe.toml"), set)?.recipe)
}

/// Says what there is to note about a recipe that was loaded.
pub(super) fn noted(resolved: Resolved) -> Recipe {
    resolved.notes.iter().for_each(|note| console::note(note));
    resolved.recipe
}

#[derive(Debug, Args)]
pub(super) struct RecipeFile {
    #[command(flatten)]
    file: RecipePath,
    /// Override a key of the recipe.
    #[arg(long = "set", value_name = "a.b=c")]
    set: Vec<String>,
    /// Train all weights and no adapter, as `finetune-full` does.
    #[arg(long)]
    full: bool,
}

impl RecipeFile {
    /// Loads it, says what there is to note about it, and has `device` compute as it wants.
    pub(super) fn load(&self, device: Device) -> Result<Recipe, Fault> {
        let resolved = if self.full {
            Recipe::load_to_train(self.file.path(), &self.set, TrainedWeights::All)?
        } else {
            Recipe::load(self.file.path(), &self.set)?
        };
        let recipe = noted(resolved);
        train::set_numerics(&recipe, device);
        Ok(recipe)
    }
}
