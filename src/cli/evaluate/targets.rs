//! What is evaluated: models with or without adapters, and the caches that each is evaluated with.

use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::PossibleValuesParser;
use tch::Device;

use crate::cache::policies;
use crate::checkpoint;
use crate::cli::used_model::{asked_revision, recipe_revision, with_cache};
use crate::data::Tokenizer;
use crate::files;
use crate::model::{Model, has_fingerprint};
use crate::recipe::{Recipe, Weights};
use crate::report::console;
use crate::train::{self, FoundCheckpoint};
use crate::units::Fault;

// No documentation of its own: clap would take it for that of the verb.
#[derive(Debug, Args)]
pub(super) struct CacheArguments {
    /// Eviction policies to evaluate, separated by commas. The recipe's own policy keeps its parameters, others have their defaults.
    #[arg(long, value_name = "POLICY", value_parser = PossibleValuesParser::new(policies::names()), value_delimiter = ',')]
    policy: Vec<String>,
    /// Cache slots per KV head to evaluate, separated by commas. `dense` keeps every entry and is evaluated once.
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    cache_length: Vec<u32>,
}

/// A model or a checkpoint, and where its recipe is.
pub(in crate::cli) struct Target {
    path: PathBuf,
    recipe: PathBuf,
    /// What it was found to be; a model has none.
    checkpoint: Option<FoundCheckpoint>,
}

/// A model that is loaded, and the recipe of one evaluation of it.
pub(super) struct LoadedTarget<'a> {
    pub(super) target: &'a Target,
    pub(super) model: &'a Model,
    pub(super) tokenizer: Option<&'a Tokenizer>,
    pub(super) recipe: &'a Recipe,
}

/// What `paths` and `bases` mean; a model that is named as on the Hub is that of the revision in `set`, else in the recipe, where it is its own.
pub(in crate::cli) fn targets(
    paths: &[PathBuf],
    bases: &[PathBuf],
    recipe: Option<&Path>,
    set: &[String],
) -> Result<Vec<Target>, Fault> {
    let mut found: Vec<(PathBuf, Option<FoundCheckpoint>)> = Vec::new();
    let revision = asked_revision(set)?;
    let located = |path: &PathBuf| match (&revision, recipe) {
        (None, Some(recipe)) if !path.exists() => files::model_dir(path, recipe_revision(recipe, set, path)?.as_deref()),
        (revision, _) => files::model_dir(path, revision.as_deref()),
    };
    for path in paths.iter().map(located) {
        let path = path?;
        let is_model = files::is_model(&path) && checkpoint::holds(&path).is_none();
        let checkpoint = (!is_model).then(|| train::find_checkpoint(&path)).transpose()?;
        found.push((path, checkpoint));
    }
    for base in bases.iter().map(located) {
        found.push((base?, None));
    }
    let first_run = found.iter().find_map(|(_, checkpoint)| checkpoint.as_ref()).map(|found| found.run.clone());
    let target = |(path, checkpoint): (PathBuf, Option<FoundCheckpoint>)| {
        let run = checkpoint.as_ref().map(|found| found.run.clone()).or_else(|| first_run.clone());
        let recipe = match (recipe, run) {
            (Some(recipe), _) => recipe.to_owned(),
            (None, Some(run)) => train::resolved_recipe_path(&run)?,
            (None, None) => {
                return Err(Fault::usage(
                    format!("the model `{}` has no recipe that names data", path.display()),
                    "name one with `--recipe`, or a run beside it",
                ));
            }
        };
        Ok(Target { path, recipe, checkpoint })
    };
    found.into_iter().map(target).collect()
}

impl CacheArguments {
    /// Whether another cache is asked for than that of the recipe.
    pub(super) fn is_asked(&self) -> bool {
        !self.policy.is_empty() || !self.cache_length.is_empty()
    }

    /// The recipes of a target, one for each cache.
    pub(super) fn recipes(&self, target: &Target, set: &[String]) -> Result<Vec<Recipe>, Fault> {
        let (own, notes) = target.recipe(set)?;
        for note in notes {
            console::note_once(&note);
        }
        let policies: Vec<Option<&str>> = optional(self.policy.iter().map(String::as_str));
        let lengths: Vec<Option<u32>> = optional(self.cache_length.iter().copied());
        let mut recipes = Vec::new();
        for policy in policies {
            // The recipe's own policy keeps its parameters.
            let is_own = policy.is_none_or(|name| name == own.kv_cache.policy.name);
            let is_dense = policy.unwrap_or(&own.kv_cache.policy.name) == "dense";
            for &length in if is_dense { &[None][..] } else { &lengths } {
                if is_own && length.is_none() {
                    recipes.push(own.clone());
                    continue;
                }
                recipes.push(target.recipe(&with_cache(set, policy.filter(|_| !is_own), length, is_dense))?.0);
            }
        }
        Ok(recipes)
    }
}

/// Each of several, or nothing once.
fn optional<T>(all: impl Iterator<Item = T>) -> Vec<Option<T>> {
    let all: Vec<Option<T>> = all.map(Some).collect();
    if all.is_empty() { vec![None] } else { all }
}

impl Target {
    /// The directory that it is known by.
    pub(in crate::cli) fn dir(&self) -> &Path {
        self.checkpoint.as_ref().map_or(&self.path, |found| &found.dir)
    }

    /// The run that it is a checkpoint of.
    pub(super) fn run(&self) -> Option<&Path> {
        self.checkpoint.as_ref().map(|found| found.run.as_path()).filter(|run| train::resolved_recipe_path(run).is_ok())
    }

    pub(super) fn adapter(&self) -> Option<&Path> {
        self.checkpoint.as_ref().filter(|found| found.holds == Weights::Adapter).map(|found| found.dir.as_path())
    }

    /// The recipe, and what is to be said of its spelling.
    pub(in crate::cli) fn recipe(&self, overrides: &[String]) -> Result<(Recipe, Vec<String>), Fault> {
        let resolved = Recipe::load(&self.recipe, overrides)?;
        let mut recipe = resolved.recipe;
        recipe.grad = recipe.grad.closed();
        match &self.checkpoint {
            None => {
                recipe.model.path = files::absolute(&self.path);
                recipe.model.adapter = None;
            }
            Some(found) if found.holds == Weights::All => {
                self.refuse_other_model(&found.dir, &recipe)?;
                recipe.model.path.clone_from(&found.dir);
            }
            Some(_) => {}
        }
        Ok((recipe, resolved.notes))
    }

    /// A checkpoint of all weights is a model of its own: another one that is asked for would go unheard.
    fn refuse_other_model(&self, checkpoint: &Path, recipe: &Recipe) -> Result<(), Fault> {
        let is_set = Recipe::load(&self.recipe, &[]).is_ok_and(|written| written.recipe.model.path != recipe.model.path);
        if !is_set {
            return Ok(());
        }
        Err(Fault::usage(
            format!("`model.path` is set, but the checkpoint `{}` holds a whole model", checkpoint.display()),
            "leave it out, or evaluate that model with `--base`",
        ))
    }

    pub(in crate::cli) fn load(&self, recipe: &Recipe, device: Device) -> Result<Model, Fault> {
        let mut model = train::base_model(recipe, self.adapter(), device)?;
        if let Some(dir) = self.adapter() {
            let (base, state) = (&recipe.model.path, checkpoint::state_of(dir)?);
            if !state.map_or(Ok(true), |state| has_fingerprint(base, &state.model_hash))? {
                let (base, dir) = (base.display(), dir.display());
                console::warning(&format!("`{base}` is not the model that `{dir}` was trained on, or has changed since"));
            }
            train::load_adapter(&mut model, dir)?;
        }
        train::check_head(recipe, &model)?;
        Ok(model)
    }
}
