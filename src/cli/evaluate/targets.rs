//! What is evaluated: models with or without adapters, and which samples of their data.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use clap::{Args, ValueEnum};
use serde::Serialize;
use tch::Device;

use crate::checkpoint;
use crate::cli::used_model::{asked_revision, recipe_revision};
use crate::data::{Dataset, Splits, Tokenizer};
use crate::dist::ProcessGroup;
use crate::files;
use crate::model::{Model, has_fingerprint};
use crate::recipe::{OnTooLong, Recipe, TrainedWeights};
use crate::report::console;
use crate::train::{self, FoundCheckpoint};
use crate::units::Fault;

/// A model or a checkpoint, and where its recipe is.
pub(in crate::cli) struct Target {
    path: PathBuf,
    recipe: PathBuf,
    /// What it was found to be; a model has none.
    checkpoint: Option<FoundCheckpoint>,
}

/// A model that is loaded, the recipe of one evaluation of it, and the ranks that share the work.
pub(super) struct LoadedTarget<'a> {
    pub(super) target: &'a Target,
    pub(super) model: &'a Model,
    pub(super) tokenizer: Option<&'a Tokenizer>,
    pub(super) recipe: &'a Recipe,
    pub(super) world: &'a Rc<ProcessGroup>,
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

impl Target {
    pub(in crate::cli) fn dir(&self) -> &Path {
        self.checkpoint.as_ref().map_or(&self.path, |found| &found.dir)
    }

    pub(super) fn run(&self) -> Option<&Path> {
        self.checkpoint.as_ref().map(|found| found.run.as_path()).filter(|run| train::resolved_recipe_path(run).is_ok())
    }

    pub(super) fn adapter(&self) -> Option<&Path> {
        self.checkpoint.as_ref().filter(|found| found.holds == TrainedWeights::Adapter).map(|found| found.dir.as_path())
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
            Some(found) if found.holds == TrainedWeights::All => {
                // It is a model of its own: another one that is asked for would go unheard.
                if Recipe::load(&self.recipe, &[]).is_ok_and(|written| written.recipe.model.path != recipe.model.path) {
                    return Err(Fault::usage(
                        format!("`model.path` is set, but the checkpoint `{}` holds a whole model", found.dir.display()),
                        "leave it out, or evaluate that model with `--base`",
                    ));
                }
                recipe.model.path.clone_from(&found.dir);
            }
            Some(_) => {}
        }
        Ok((recipe, resolved.notes))
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

#[derive(Debug, Args)]
pub(in crate::cli) struct SampleArguments {
    /// Which samples to use; `rest`: those of the training file that `data.on_too_long = "drop"` leaves out.
    #[arg(long, value_enum, default_value_t = Split::Validation)]
    pub(super) split: Split,
    /// Use only the first N samples of the split.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) limit: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Split {
    Train,
    Validation,
    Rest,
}

impl SampleArguments {
    pub(in crate::cli) fn choose(&self, splits: Splits, recipe: &Recipe) -> Result<Dataset, Fault> {
        let (found, message, hint) = match self.split {
            Split::Train => (Some(splits.train), "", ""),
            Split::Validation => (
                splits.validation,
                "the recipe holds no samples out for validation",
                "use `--split train`, or `--set data.validation_fraction=0.1`",
            ),
            Split::Rest if recipe.data.each().any(|data| data.on_too_long == OnTooLong::Drop) => (
                splits.rest,
                "no sample is left out that the model has positions for",
                "set a smaller `data.max_seq_length`, or use another `--split`",
            ),
            Split::Rest => (
                None,
                "no sample is left out: `data.on_too_long` is not `drop`",
                "use `--set data.on_too_long=drop` with the `data.max_seq_length` of training",
            ),
        };
        let limit = self.limit.map_or(usize::MAX, |limit| limit as usize);
        found.map(|dataset| dataset.first(limit)).ok_or_else(|| Fault::usage(message, hint))
    }
}
