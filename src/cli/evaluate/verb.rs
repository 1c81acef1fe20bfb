//! The verb: every model with every cache, one after the other.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use clap::Args;
use clap::builder::PossibleValuesParser;
use tch::Device;

use super::answers::AnswerArguments;
use super::results::{self, Evaluated};
use super::targets::{self, LoadedTarget, SampleArguments, Target};
use crate::cache::policies;
use crate::cli::used_model::{fit_chunks, with_cache};
use crate::cli::world::Joining;
use crate::data::{Dataset, Splits, Tokenizer};
use crate::dist::ProcessGroup;
use crate::engine::{Engine, NoObserver};
use crate::eval::{self, AnswerFile, DatasetRun, SampleLoss, TokenClasses};
use crate::files;
use crate::model::{Model, ModelConfig};
use crate::recipe::{BatchSize, Recipe};
use crate::report::console;
use crate::train;
use crate::units::Fault;

/// Evaluate runs, checkpoints and models with one or several caches: loss, accuracy, generated answers.
#[derive(Debug, Args)]
pub(in crate::cli) struct Evaluate {
    /// Runs (their `final`, else their newest checkpoint), checkpoints, and models, which have no adapter.
    #[arg(value_name = "RUN|CHECKPOINT|MODEL", required_unless_present = "base")]
    paths: Vec<PathBuf>,
    /// Evaluate this model without an adapter; may be given several times.
    #[arg(long, value_name = "MODEL")]
    base: Vec<PathBuf>,
    /// The recipe to evaluate with; a run's own, if left out, and for a model that of the first run.
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// Eviction policies to evaluate, separated by commas. The recipe's own policy keeps its parameters, others have their defaults.
    #[arg(long, value_name = "POLICY", value_parser = PossibleValuesParser::new(policies::names()), value_delimiter = ',')]
    policy: Vec<String>,
    /// Cache slots per KV head to evaluate, separated by commas. `dense` keeps every entry and is evaluated once.
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    cache_length: Vec<u32>,
    /// Override a key of the recipe.
    #[arg(long = "set", value_name = "a.b=c")]
    set: Vec<String>,
    #[command(flatten)]
    samples: SampleArguments,
    /// Write the losses of each sample and target to this JSONL file. Where answers are generated, losses are computed only with it or
    /// with `--token-classes`.
    #[arg(long, value_name = "FILE")]
    losses: Option<PathBuf>,
    /// Report losses by classes of tokens, too, which this file names: JSON lines `{"sample": 3, "classes": {"far": [0, 17]}}`, targets
    /// being counted from 0.
    #[arg(long, value_name = "FILE")]
    token_classes: Option<PathBuf>,
    #[command(flatten)]
    answers: AnswerArguments,
    /// Write what the cache evicts over the longest of the samples to this file, for `kvtune inspect --evictions`.
    #[arg(long, value_name = "FILE")]
    replay_log: Option<PathBuf>,
    #[command(flatten)]
    pub(in crate::cli) joining: Joining,
}

impl Evaluate {
    pub(in crate::cli) fn run(&self, device: Device, world: &Rc<ProcessGroup>) -> Result<(), Fault> {
        self.answers.check()?;
        // What is wrong with a recipe shall not come to light behind hours of work.
        let is_other = !self.policy.is_empty() || !self.cache_length.is_empty();
        let mut targets = Vec::new();
        for target in targets::targets(&self.paths, &self.base, self.recipe.as_deref(), &self.set)? {
            let mut recipes = self.recipes(&target)?;
            for recipe in &mut recipes {
                self.answers.check_head(recipe)?;
                fit_chunks(recipe, &ModelConfig::load(&recipe.model)?, is_other, &self.set)?;
            }
            targets.push((target, recipes));
        }
        // What fails takes nothing along of what was done before it.
        let mut results = Vec::new();
        let done = self.all(&targets, device, world, &mut results);
        let told = if results.is_empty() { Ok(()) } else { self.tell(&results, world) };
        let shared_file = done?;
        told?;
        shared_file.map_or(Ok(()), AnswerFile::finish)
    }

    /// Evaluates all models with their caches, and adds what comes of each; returns the file of all answers, where one is named.
    fn all(
        &self,
        targets: &[(Target, Vec<Recipe>)],
        device: Device,
        world: &Rc<ProcessGroup>,
        results: &mut Vec<Evaluated>,
    ) -> Result<Option<AnswerFile>, Fault> {
        let evaluations = targets.iter().map(|(_, recipes)| recipes.len()).sum();
        if self.replay_log.is_some() && evaluations != 1 {
            return Err(Fault::usage(
                format!("`--replay-log` names one file, and {evaluations} models and caches are evaluated"),
                "evaluate one model with one policy and one cache length at a time",
            ));
        }
        let mut shared_file = self.answers.file(world)?;
        let wanted = self.wanted_losses()?;
        for (target, recipes) in targets {
            let Some(first) = recipes.first() else { continue };
            train::set_numerics(first, device);
            let model = target.load(first, device)?;
            let tokenizer = Tokenizer::load_if_present(&first.model.path)?;
            for recipe in recipes {
                let loaded = LoadedTarget { target, model: &model, tokenizer: tokenizer.as_ref(), recipe, world };
                let mut result = self.one(&loaded, evaluations, wanted.as_ref(), &mut shared_file)?;
                if let Some(first) = results.first() {
                    result.differences = results::differences(first, &result);
                }
                if console::speech().is_json {
                    console::result(&result.to_json().to_string())?;
                }
                results.push(result);
            }
        }
        Ok(shared_file)
    }

    fn tell(&self, results: &[Evaluated], world: &ProcessGroup) -> Result<(), Fault> {
        if !console::speech().is_json {
            console::table(&results::table(results))?;
            results::table_of_differences(results).map_or(Ok(()), |table| console::table(&table))?;
        }
        let file = self.losses.as_ref().filter(|_| world.is_first());
        file.map_or(Ok(()), |path| results::write_losses(path, results))
    }

    /// The recipes of a target, one for each cache.
    fn recipes(&self, target: &Target) -> Result<Vec<Recipe>, Fault> {
        let (own, notes) = target.recipe(&self.set)?;
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
                recipes.push(target.recipe(&with_cache(&self.set, policy.filter(|_| !is_own), length, is_dense))?.0);
            }
        }
        Ok(recipes)
    }

    /// The classes that losses are wanted for beside those of all targets; `None` where no losses are wanted.
    fn wanted_losses(&self) -> Result<Option<TokenClasses>, Fault> {
        if let Some(folder) = self.losses.as_deref().and_then(Path::parent).filter(|folder| !folder.as_os_str().is_empty()) {
            files::make_dir(folder)?;
        }
        match &self.token_classes {
            Some(path) => TokenClasses::read(path).map(Some),
            None => Ok((self.losses.is_some() || !self.answers.are_wanted()).then(TokenClasses::default)),
        }
    }

    /// One model with one cache of so many evaluations.
    fn one(
        &self,
        loaded: &LoadedTarget<'_>,
        evaluations: usize,
        wanted: Option<&TokenClasses>,
        shared_file: &mut Option<AnswerFile>,
    ) -> Result<Evaluated, Fault> {
        let LoadedTarget { target, model, tokenizer, recipe, world } = *loaded;
        let engine = train::engine(recipe, model.config(), tokenizer, None)?;
        let splits = open_data(loaded)?;
        console::note_once(&splits.to_string());
        let dataset = self.samples.choose(splits, recipe)?;
        let spec = self.answers.spec(loaded, &dataset, self.samples.split)?;
        let settings = spec.iter().filter_map(|spec| spec.settings.as_object()).flatten();
        let facts = settings.map(|(key, value)| (format!("answers.{key}"), value.to_string()));
        let further =
            [("models and caches", evaluations.to_string()), ("losses", files::hash_bytes(format!("{wanted:?}").as_bytes()))];
        let facts = facts.chain(further.map(|(name, value)| (name.to_owned(), value))).collect();
        train::check_same_evaluation(world, recipe, model, &dataset, facts)?;
        let batch = recipe.eval.micro_batch_size.map_or(recipe.train.batch_size, BatchSize::Sequences);
        // Who says how many samples means as many.
        let max_batches = recipe.eval.max_batches.filter(|_| self.samples.limit.is_none());
        let batches = eval::batches(&dataset, batch, max_batches);
        let shown: usize = batches.iter().map(Vec::len).sum();
        if let Some(max) = max_batches.filter(|_| shown < dataset.len()) {
            console::note_once(&format!("the {shown} shortest of {} samples: `eval.max_batches` = {max}", dataset.len()));
        }
        let indices = batches.iter().flatten().filter_map(|&sample| dataset.index_of(sample));
        wanted.map_or(Ok(()), |classes| classes.check_samples(indices))?;
        // First, as there is more that they may be refused for.
        let answer = |spec| self.answers.answer(loaded, &engine, &dataset, spec, shared_file);
        let answers = spec.as_ref().map(answer).transpose()?;
        let run = DatasetRun { engine: &engine, model, dataset: &dataset, batches: &batches, world };
        let losses =
            wanted.map(|_| run.losses(self.losses.is_some() || self.token_classes.is_some(), &mut NoObserver)).transpose()?;
        let scores = losses.as_ref().map(|losses| run.scores(losses)).transpose()?;
        // In the order of the data, in which the windows of a text follow each other.
        let mut losses: Vec<_> = batches.iter().flatten().zip(losses.unwrap_or_default()).collect();
        losses.sort_by_key(|(index, _)| **index);
        let losses: Vec<SampleLoss> = losses.into_iter().map(|(_, loss)| loss).collect();
        let class_sums = losses.iter().filter_map(|loss| wanted.map(|classes| classes.sums(loss))).collect::<Result<_, _>>()?;
        if let Some(path) = self.replay_log.as_ref().filter(|_| world.is_first()) {
            keep_log(path, &engine, model, &dataset)?;
        }
        let evicts = !recipe.kv_cache.policy.is_dense();
        Ok(Evaluated {
            name: target.dir().to_owned(),
            split: self.samples.split,
            policy: recipe.kv_cache.policy.clone(),
            slots: if evicts { recipe.kv_cache.cache_length.to_string() } else { "all".to_owned() },
            scores,
            losses,
            class_sums,
            answers,
            differences: BTreeMap::new(),
        })
    }
}

/// Each of several, or nothing once.
fn optional<T>(all: impl Iterator<Item = T>) -> Vec<Option<T>> {
    let all: Vec<Option<T>> = all.map(Some).collect();
    if all.is_empty() { vec![None] } else { all }
}

/// The first rank reads the data first, and keeps their tokens for the others.
fn open_data(loaded: &LoadedTarget<'_>) -> Result<Splits, Fault> {
    let LoadedTarget { model, tokenizer, recipe, world, .. } = *loaded;
    let open = || train::open_data(recipe, model.config(), tokenizer);
    world.first("reading the data", open)?.map_or_else(open, Ok)
}

/// Runs the longest sample once more, and writes what left its cache.
fn keep_log(path: &Path, engine: &Engine, model: &Model, dataset: &Dataset) -> Result<(), Fault> {
    let Some(longest) = (0..dataset.len()).max_by_key(|&sample| dataset.lengths()[sample]) else { return Ok(()) };
    let (_, log) = engine.inspect(model, &dataset.batch(&[longest])?, None, &mut |_, _| {})?;
    log.save(&files::behind_links(path)?)?;
    console::note(&format!("wrote the replay log of a sample of {} tokens to `{}`", dataset.lengths()[longest], path.display()));
    Ok(())
}
