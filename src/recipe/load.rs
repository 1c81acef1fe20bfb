//! The way from a file or a text to a checked recipe.

use std::io;
use std::path::Path;

use super::diagnose::of_file;
use super::refusals::Refusals;
use super::tree::{Document, RecipeSource};
use super::{Recipe, TrainedWeights, alias, kv_cache, overrides, resolve, sets_by_name, suggest};
use crate::files::{self, FileKind};
use crate::units::{Fault, FaultKind};

#[derive(Clone, Debug)]
pub struct Resolved {
    pub recipe: Recipe,
    /// One line for each spelling that is another program's, with its place.
    pub notes: Vec<String>,
}

impl Recipe {
    /// Loads a recipe. `overrides` are as given behind `--set`: `kv_cache.chunk_size=8`.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Resolved, Fault> {
        Self::parse(Self::read(path)?, path, overrides)
    }

    /// Loads a recipe to train `weights`, as if it said so; one that says otherwise is refused.
    pub fn load_to_train(path: &Path, overrides: &[String], weights: TrainedWeights) -> Result<Resolved, Fault> {
        Self::resolve(Self::read(path)?, path, overrides, Some(weights))
    }

    /// The text of a recipe, or of what one is made of.
    pub(super) fn read(path: &Path) -> Result<String, Fault> {
        files::read_text(path, FileKind::Recipe).map_err(|error| {
            let message = error.io().map_or_else(|| error.to_string(), ToString::to_string);
            let is_missing = error.io().is_some_and(|source| source.kind() == io::ErrorKind::NotFound);
            let is_no_file = error.io().is_none() && error.kind() == FaultKind::NotRegular;
            let hint = error.hint().filter(|_| !is_missing && !is_no_file);
            let hint = hint.unwrap_or_else(|| "name a recipe in TOML, as `recipes/quickstart.toml`".to_owned());
            of_file(path, format!("the recipe cannot be read: {message}"), hint)
        })
    }

    /// Loads a recipe from its text; `path` says where its relative paths begin.
    pub fn parse(text: String, path: &Path, overrides: &[String]) -> Result<Resolved, Fault> {
        Self::resolve(text, path, overrides, None)
    }

    /// What a recipe would say of a model that is used and not trained: nothing is evicted, and no data are named.
    pub fn of_model(model: &Path, overrides: &[String]) -> Result<Resolved, Fault> {
        let path = toml::Value::from(model.display().to_string());
        let text = format!("model.path = {path}\ndata = {{ train = {path}, format = 'tokens' }}\n{}", kv_cache::DENSE);
        Self::parse(text, Path::new("command line"), overrides)
    }

    fn resolve(text: String, path: &Path, overrides: &[String], weights: Option<TrainedWeights>) -> Result<Resolved, Fault> {
        let (path, overrides, suggest_key) = (path.to_owned(), overrides.to_vec(), suggest::suggest_key);
        let source = RecipeSource { path, text, overrides, suggest_key };
        let (mut document, mut refusals) = (Document::parse(source)?, Refusals::default());
        overrides::apply(&mut document, &mut refusals);
        let mut notes = alias::apply(&mut document, &mut refusals);
        notes.extend(sets_by_name::apply(&mut document, &mut refusals));
        let recipe = resolve::resolve(&mut document, weights, &mut refusals);
        refusals.or_recipe(recipe).map(|recipe| Resolved { recipe, notes })
    }
}
