//! `kvtune evaluate`: runs, checkpoints and models, each with one or several caches, on a split.

mod answers;
mod table;
mod targets;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tch::Device;

use crate::data::{Dataset, Splits, Tokenizer};
use crate::engine::{Settings, Silent};
use crate::error::Error;
use crate::eval::{self, AnswerFile, AnswerScores, Scores};
use crate::model::{Model, ModelConfig};
use crate::recipe::{OnTooLong, Recipe};
use crate::report::console;
use crate::train;
use answers::AnswerArguments;
use targets::{CacheArguments, Target};

#[derive(Debug, Args)]
pub(super) struct Evaluate {
    /// Runs (their best known end: `final`, else their newest checkpoint), checkpoints, and models, which have no adapter.
    #[arg(value_name = "RUN|CHECKPOINT|MODEL", required_unless_present = "base")]
    paths: Vec<PathBuf>,
    /// Evaluate this model without an adapter; may be given several times.
    #[arg(long, value_name = "MODEL")]
    base: Vec<PathBuf>,
    /// The recipe to evaluate with; a run's own, if left out, and for a model that of the first run.
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    #[command(flatten)]
    caches: CacheArguments,
    /// Override a key of the recipe.
    #[arg(long = "set", value_name = "a.b=c")]
    set: Vec<String>,
    /// Which samples; `rest` are those of the training file that `data.on_too_long = "drop"` leaves out.
    #[arg(long, value_enum, default_value_t = Split::Validation)]
    split: Split,
    /// The first samples of the split alone.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
    #[command(flatten)]
    answers: AnswerArguments,
    /// How to print: a table, or a JSON object per line for each model and cache.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Split {
    Train,
    Validation,
    Rest,
}

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    Table,
    Json,
}

/// What came of a model with a cache.
struct Evaluated {
    name: PathBuf,
    policy: String,
    slots: String,
    scores: Scores,
    answers: Option<AnswerScores>,
}

/// A model that is loaded, and the recipe of one evaluation of it.
struct Loaded<'a> {
    target: &'a Target,
    model: &'a Model,
    tokenizer: Option<&'a Tokenizer>,
    recipe: &'a Recipe,
}

impl Evaluate {
    pub(super) fn run(&self, device: Device) -> Result<(), Error> {
        self.answers.check()?;
        // What is wrong with a recipe shall not come to light behind hours of work.
        let mut targets = Vec::new();
        for target in targets::targets(&self.paths, &self.base, self.recipe.as_deref())? {
            let recipes = self.caches.recipes(&target, &self.set)?;
            for recipe in &recipes {
                self.answers.check_head(recipe)?;
                Settings::new(&ModelConfig::load(&recipe.model.path)?, &recipe.kv_cache, &recipe.grad)?;
            }
            targets.push((target, recipes));
        }
        let mut shared_file = self.answers.file()?;
        let mut results = Vec::new();
        for (target, recipes) in &targets {
            let Some(first) = recipes.first() else { continue };
            train::set_numerics(first, device);
            let model = target.load(first, device)?;
            let tokenizer = train::tokenizer(&first.model.path)?;
            let mut said = String::new();
            for recipe in recipes {
                let loaded = Loaded { target, model: &model, tokenizer: tokenizer.as_ref(), recipe };
                let result = self.one(&loaded, &mut shared_file, &mut said)?;
                if self.format == Format::Json {
                    console::result(&result.to_json().to_string())?;
                }
                results.push(result);
            }
        }
        if let Some(file) = shared_file {
            file.finish()?;
        }
        if self.format == Format::Table {
            console::result(&table::of(&results).to_string())?;
        }
        Ok(())
    }

    /// One model with one cache; of the data nothing is said twice.
    fn one(&self, loaded: &Loaded<'_>, shared_file: &mut Option<AnswerFile>, said: &mut String) -> Result<Evaluated, Error> {
        let Loaded { target, model, tokenizer, recipe } = *loaded;
        let engine = train::engine(recipe, model.config(), tokenizer, None)?;
        let splits = train::open_data(recipe, model.config(), tokenizer)?;
        let report = splits.report.to_string();
        if *said != report {
            console::note(&report);
            *said = report;
        }
        let mut dataset = self.choose(splits, recipe)?;
        if let Some(limit) = self.limit {
            dataset = dataset.first(limit as usize);
        }
        let batch = recipe.eval.micro_batch_size.unwrap_or(recipe.train.micro_batch_size);
        // Who says how many samples means as many.
        let max_batches = recipe.eval.max_batches.filter(|_| self.limit.is_none());
        if let Some(max) = max_batches.filter(|max| max.saturating_mul(batch) < dataset.len()) {
            let shown = max.saturating_mul(batch);
            console::note(&format!("the {shown} shortest of {} samples: `eval.max_batches` = {max}", dataset.len()));
        }
        // First, as there is more that they may be refused for.
        let answers = self.answers.answer(loaded, (&engine, &dataset), self.split.name(), shared_file)?;
        let scores = eval::score((&engine, model), &dataset, batch, max_batches, &mut Silent)?;
        let evicts = recipe.kv_cache.policy.name != "dense";
        Ok(Evaluated {
            name: target.dir().to_owned(),
            policy: recipe.kv_cache.policy.name.clone(),
            slots: if evicts { recipe.kv_cache.cache_length.to_string() } else { "all".to_owned() },
            scores,
            answers,
        })
    }

    fn choose(&self, splits: Splits, recipe: &Recipe) -> Result<Dataset, Error> {
        let (found, message, hint) = match self.split {
            Split::Train => return Ok(splits.train),
            Split::Validation => (
                splits.validation,
                "the recipe holds no samples out for validation",
                "use `--split train`, or `--set data.validation_fraction=0.1`",
            ),
            Split::Rest if recipe.data.on_too_long == OnTooLong::Drop => (
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
        found.ok_or_else(|| Error::Usage { message: message.into(), hint: hint.into() })
    }
}

impl Split {
    fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Validation => "validation",
            Self::Rest => "rest",
        }
    }
}

impl Evaluated {
    fn to_json(&self) -> serde_json::Value {
        let Self { name, policy, slots, scores, answers } = self;
        let mut value = serde_json::json!({ "evaluated": name, "policy": policy, "cache_length": slots, "scores": scores });
        if let Some(answers) = answers {
            value["answers"] = serde_json::json!(answers);
        }
        value
    }
}
