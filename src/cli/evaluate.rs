//! `kvtune evaluate`: a run, a checkpoint or a model on a split.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use tch::Device;

use crate::data::Dataset;
use crate::engine::Silent;
use crate::error::Error;
use crate::eval::{self, Score, Scores};
use crate::recipe::{Recipe, Weights};
use crate::report::table::Table;
use crate::report::{ReportError, console};
use crate::train;

#[derive(Debug, Args)]
pub(super) struct Evaluate {
    /// A run (its best known end: `final`, else its newest checkpoint) or one checkpoint.
    #[arg(value_name = "RUN|CHECKPOINT", required_unless_present = "base")]
    checkpoint: Option<PathBuf>,
    /// Evaluate this model without an adapter.
    #[arg(long, value_name = "MODEL", conflicts_with = "checkpoint", requires = "recipe")]
    base: Option<PathBuf>,
    /// The recipe to evaluate with; a run's own, if left out.
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// Override a key of the recipe.
    #[arg(long = "set", value_name = "a.b=c")]
    set: Vec<String>,
    /// Which samples.
    #[arg(long, value_enum, default_value_t = Split::Validation)]
    split: Split,
    /// How to print.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Split {
    Train,
    Validation,
}

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    Table,
    Json,
}

impl Evaluate {
    pub(super) fn run(&self, device: Device) -> Result<(), Error> {
        let checkpoint = self.checkpoint.as_deref().map(train::find_checkpoint).transpose()?;
        let recipe_path = match (&self.recipe, &checkpoint) {
            (Some(path), _) => path.clone(),
            (None, Some(found)) => train::resolved_recipe(&found.run)?,
            // clap lets neither pass.
            (None, None) => PathBuf::new(),
        };
        let resolved = Recipe::load(&recipe_path, &self.set)?;
        resolved.notes.iter().for_each(|note| console::note(note));
        let mut recipe = resolved.recipe;
        train::set_numerics(&recipe, device);
        recipe.grad = recipe.grad.closed();
        if let Some(base) = &self.base {
            recipe.model.path = std::path::absolute(base).unwrap_or_else(|_| base.clone());
            recipe.model.adapter = None;
        }
        if let Some(found) = checkpoint.as_ref().filter(|found| found.holds == Weights::All) {
            refuse_other_model(&found.dir, &recipe_path, &recipe)?;
            recipe.model.path.clone_from(&found.dir);
        }
        let mut model = train::base_model(&recipe, device)?;
        if let Some(found) = checkpoint.as_ref().filter(|found| found.holds == Weights::Adapter) {
            train::load_adapter(&mut model, &found.dir)?;
        }
        let tokenizer = train::tokenizer(&recipe.model.path)?;
        let engine = train::engine(&recipe, model.config(), tokenizer.as_ref(), None)?;
        let splits = train::open_data(&recipe, model.config(), tokenizer.as_ref())?;
        console::note(&splits.report.to_string());
        let dataset = self.choose(&splits.train, splits.validation.as_ref())?;
        let batch = recipe.eval.micro_batch_size.unwrap_or(recipe.train.micro_batch_size);
        if let Some(max) = recipe.eval.max_batches.filter(|max| max.saturating_mul(batch) < dataset.len()) {
            let shown = max.saturating_mul(batch);
            console::note(&format!("the {shown} shortest of {} samples: `eval.max_batches` = {max}", dataset.len()));
        }
        let scores = eval::score((&engine, &model), dataset, batch, recipe.eval.max_batches, &mut Silent)?;
        let name = checkpoint.map_or(recipe.model.path, |c| c.dir);
        Ok(self.print(&name, &scores)?)
    }

    fn choose<'a>(&self, train: &'a Dataset, validation: Option<&'a Dataset>) -> Result<&'a Dataset, Error> {
        match (self.split, validation) {
            (Split::Train, _) => Ok(train),
            (Split::Validation, Some(validation)) => Ok(validation),
            (Split::Validation, None) => Err(Error::Usage {
                message: "the recipe holds no samples out for validation".into(),
                hint: "use `--split train`, or `--set data.validation_fraction=0.1`".into(),
            }),
        }
    }

    fn print(&self, name: &Path, scores: &Scores) -> Result<(), ReportError> {
        if self.format == Format::Json {
            let value = serde_json::json!({ "evaluated": name, "scores": scores });
            return console::result(&value.to_string());
        }
        let mut table = Table::new(&["length", "samples", "tokens", "targets", "loss", "perplexity", "accuracy"]);
        for bucket in &scores.by_length {
            add(&mut table, &format!("≤ {}", bucket.up_to), &bucket.score);
        }
        add(&mut table, "all", &scores.overall);
        console::result(&table.to_string())
    }
}

/// A checkpoint of all weights is a model of its own: another one that is asked for would go unheard.
fn refuse_other_model(checkpoint: &Path, recipe_path: &Path, recipe: &Recipe) -> Result<(), Error> {
    let is_set = Recipe::load(recipe_path, &[]).is_ok_and(|written| written.recipe.model.path != recipe.model.path);
    if !is_set {
        return Ok(());
    }
    Err(Error::Usage {
        message: format!("`model.path` is set, but the checkpoint `{}` holds a whole model", checkpoint.display()),
        hint: "leave it out, or evaluate that model with `--base`".into(),
    })
}

fn add(table: &mut Table, name: &str, score: &Score) {
    table.row(&[
        name,
        &score.samples.to_string(),
        &score.tokens.to_string(),
        &score.targets.to_string(),
        &format!("{:.4}", score.loss),
        &format!("{:.3}", score.perplexity),
        &format!("{:.1} %", 100.0 * score.accuracy),
    ]);
}
