//! Answers of an evaluation: whether there are any, how they are generated and scored, and where they are kept.

use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use super::targets::{LoadedTarget, Split};
use crate::cli::generate::RuleArguments;
use crate::cli::used_model::{identity, own_rules};
use crate::cli::values::metric;
use crate::data::Dataset;
use crate::dist::ProcessGroup;
use crate::engine::Engine;
use crate::eval::{self, ANSWERS, AnswerFile, AnswerScores, AnswerSpec, ScoredAnswer};
use crate::files;
use crate::generation::{GenerationRules, Generator, SamplingRules};
use crate::metrics::Metric;
use crate::recipe::{HeadRecipe, Recipe};
use crate::report::console;
use crate::units::Fault;

/// Texts that are written at the same time.
const WIDTH: u16 = 8;

#[derive(Debug, Args)]
pub(super) struct AnswerArguments {
    /// Write an answer to each prompt, greedily unless told otherwise, and score it: `longbench_v2` for LongBench v2, `ruler_all` for
    /// RULER, `substring` for HELMET, else `exact_match` and `f1`.
    #[arg(long)]
    generate: bool,
    /// Generate an answer to each prompt, and score it by these metrics, separated by commas.
    #[arg(long, value_name = "METRIC", value_delimiter = ',', hide_possible_values = true, value_parser = metric())]
    metrics: Vec<Metric>,
    /// Generate an answer to each prompt, and keep it in this JSONL file; answers that it already has are not generated again. Default: a
    /// file for each cache in the folder `answers` of the run.
    #[arg(long, value_name = "FILE")]
    answers: Option<PathBuf>,
    /// Maximum number of answers generated at once [default: 8].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    batch: Option<u16>,
    #[command(flatten)]
    rules: RuleArguments,
}

impl AnswerArguments {
    pub(super) fn are_wanted(&self) -> bool {
        self.generate || !self.metrics.is_empty() || self.answers.is_some()
    }

    /// Refuses what would go unheard.
    pub(super) fn check(&self) -> Result<(), Fault> {
        if self.are_wanted() || (self.rules == RuleArguments::default() && self.batch.is_none()) {
            return Ok(());
        }
        Err(Fault::usage(
            "it is said how answers are generated, and none are asked for",
            "add `--generate`, or `--metrics` with the metrics to score them by",
        ))
    }

    pub(super) fn check_head(&self, recipe: &Recipe) -> Result<(), Fault> {
        if !self.are_wanted() || recipe.head == HeadRecipe::NextToken {
            return Ok(());
        }
        Err(Fault::usage(
            "the recipe's head reads a class, and generates no answers",
            "leave `--generate` and `--metrics` out, or use `--set head.kind=next_token`",
        ))
    }

    /// The file of all answers, where one is named; the first rank keeps it.
    pub(super) fn file(&self, world: &ProcessGroup) -> Result<Option<AnswerFile>, Fault> {
        let path = self.answers.as_deref().filter(|_| world.is_first());
        path.map(AnswerFile::open).transpose()
    }

    /// Answers the samples of a dataset; ranks share them.
    pub(super) fn answer(
        &self,
        loaded: &LoadedTarget<'_>,
        engine: &Engine,
        dataset: &Dataset,
        spec: &AnswerSpec,
        shared_file: &mut Option<AnswerFile>,
    ) -> Result<(AnswerScores, Vec<ScoredAnswer>), Fault> {
        let has_own = self.answers.is_none() && loaded.world.is_first();
        let mut own = if has_own { Some(AnswerFile::open(&default_path(loaded, &spec.settings)?)?) } else { None };
        let mut file = shared_file.as_mut().or(own.as_mut());
        let before = file.as_ref().map_or(0, |file| file.taken());
        let generator = Generator::new(engine, loaded.model, loaded.tokenizer, spec.width);
        let answers = eval::answer(generator, dataset, spec, file.as_deref_mut(), loaded.world, &|| false)?;
        if let Some(file) = file {
            let (path, taken) = (file.path().display(), file.taken() - before);
            console::note(&format!("{} answers, {taken} of which were there already, are in `{path}`", answers.len()));
        }
        let empty = answers.iter().filter(|answer| answer.prediction.trim().is_empty()).count();
        if empty > 0 {
            console::note(&format!("{empty} of the answers are empty, and count as wrong ones"));
        }
        own.map_or(Ok(()), AnswerFile::finish)?;
        Ok((AnswerScores::of(&answers), answers))
    }

    /// How the samples of a dataset are answered; none, where no answers are asked for.
    pub(super) fn spec(&self, loaded: &LoadedTarget<'_>, dataset: &Dataset, split: Split) -> Result<Option<AnswerSpec>, Fault> {
        if !self.are_wanted() {
            return Ok(None);
        }
        let LoadedTarget { target, model, recipe, .. } = *loaded;
        let own = own_rules(&recipe.model.path)?;
        let sampling = SamplingRules { do_sample: false, ..own.sampling };
        let rules = self.rules.over(GenerationRules { sampling, max_new_tokens: None, max_length: None, ..own })?;
        // Only rankings have labels for references.
        let are_ranks = || dataset.question(0).is_ok_and(|first| Metric::Ndcg10.score("", &first.references).is_ok());
        let metrics = match (&self.metrics[..], dataset.format()) {
            ([], Some(format)) => (format.metrics)(recipe.data.each().find_map(|data| data.family), &are_ranks),
            ([], None) => &[Metric::ExactMatch, Metric::F1],
            (asked, _) => asked,
        };
        let metrics = metrics.to_vec();
        // Products of experts are as large as their tokens are many: alone, each text has the same bits whatever was there already.
        let has_experts = model.config().has_experts();
        if has_experts && self.batch.is_some_and(|batch| batch > 1) {
            console::note("the model has experts: its answers are written one by one");
        }
        let width = usize::from(if has_experts { 1 } else { self.batch.unwrap_or(WIDTH) });
        let used = identity(recipe, target.adapter())?;
        let settings = json!({
            "model": used.model, "adapter": used.adapter, "cache": used.cache, "dtype": used.dtype, "data": dataset.hash(),
            "split": split, "rules": rules, "metrics": metrics, "batch": width,
        });
        Ok(Some(AnswerSpec { rules, metrics, width, settings }))
    }
}

/// Beside the run, a file for each checkpoint, split and settings.
fn default_path(loaded: &LoadedTarget<'_>, settings: &Value) -> Result<PathBuf, Fault> {
    let Some(run) = loaded.target.run() else {
        return Err(Fault::usage(
            format!("`{}` is not in a run, so its answers have no default place", loaded.target.dir().display()),
            "name a file with `--answers`",
        ));
    };
    let name = loaded.target.dir().file_name().unwrap_or_default().to_string_lossy();
    let (split, hash) = (settings["split"].as_str().unwrap_or_default(), files::hash_bytes(settings.to_string().as_bytes()));
    Ok(run.join(ANSWERS).join(format!("{name}-{split}-{}.jsonl", &hash[..8])))
}
