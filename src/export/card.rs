//! The model card: `README.md` of what is exported and of a run's end, from the recipe and the figures of its run.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::hub::BaseModel;
use super::trained::{CacheResult, ExportTarget, Trained};
use super::usage::Usage;
use crate::files::cached_id;
use crate::recipe::{LoraRecipe, Recipe, TemplateChoice, TrainedWeights, ValidationSource};
use crate::report::metrics::{Evicted, StepMetrics};
use crate::report::table::Table;
use crate::units::counted;

/// The card of a run's end, whose base is the recipe's model.
pub fn card_of_run(trained: &Trained<'_>, recipe: &Recipe, hash: &str) -> String {
    let target = if trained.holds == TrainedWeights::All { ExportTarget::Merged } else { ExportTarget::Peft };
    let base = &recipe.model.path;
    card(trained, &Usage::of(target, recipe.head.num_classes(), base), base, hash)
}

pub(super) fn card(trained: &Trained<'_>, usage: &Usage, base: &Path, hash: &str) -> String {
    let is_model = usage.target.is_whole();
    let adapter = trained.recipe.and_then(|recipe| recipe.lora.as_ref()).map_or("LoRA", LoraRecipe::kind);
    let kind = if is_model { "A model".to_owned() } else { format!("A {adapter} adapter") };
    let base = BaseModel::read(base);
    let shown = trained.recipe.map(|recipe| without_places(recipe, &base.name));
    let what = if is_model { "made from" } else { "for" };
    let version = env!("CARGO_PKG_VERSION");
    let mut text = front_matter(trained, usage, &base);
    let block = |(language, lines): (&str, String)| format!("```{language}\n{lines}\n```");
    let blocks: Vec<String> = usage.lines(&base.name, ".").into_iter().map(block).collect();
    // Writing to a text cannot fail.
    let _ = write!(
        text,
        "\n# {name}\n\n{kind} {what} `{base_model}`, trained with kvtune {version} through a KV cache of fixed size. It expects the cache \
         that it was trained with: other policies and lengths work, with other results.\n\n{}\n\n## Use\n\n{}\n",
        figures(trained, shown.as_ref(), &base.name, hash),
        blocks.join("\n\n"),
        name = trained.name(),
        base_model = base.name,
    );
    if let Some(recipe) = shown {
        let _ = write!(text, "\n## Recipe\n\n```toml\n{}```\n", recipe.to_toml());
    }
    text
}

/// What the Hub reads: YAML, of which each value is written as JSON.
fn front_matter(trained: &Trained<'_>, usage: &Usage, base: &BaseModel) -> String {
    let is_model = usage.target.is_whole();
    let task = if usage.classes.is_some() { "text-classification" } else { "text-generation" };
    let paths = trained.recipe.map_or_else(Vec::new, |recipe| paths(recipe, None));
    let data: BTreeSet<String> = paths.into_iter().filter_map(|path| cached_id(path, "datasets")).collect();
    let results: Vec<Value> =
        all_results(trained).iter().filter_map(|result| in_model_index(result, trained.recipe?, task)).collect();
    let keys = [
        ("library_name", Some(json!(usage.target.library()))),
        ("pipeline_tag", Some(json!(task))),
        ("base_model", base.id.as_ref().map(|id| json!(id))),
        ("datasets", (!data.is_empty()).then(|| json!(data))),
        ("tags", Some(if is_model { json!(["kvtune"]) } else { json!(["kvtune", "lora"]) })),
        ("model-index", (!results.is_empty()).then(|| json!([{ "name": trained.name(), "results": results }]))),
    ];
    let own = keys.into_iter().filter_map(|(key, value)| Some((key, value?)));
    let license = base.license.iter().map(|(key, value)| (key.as_str(), value.clone()));
    let lines: Vec<String> = own.chain(license).map(|(key, value)| format!("{key}: {value}\n")).collect();
    format!("---\n{}---\n", lines.concat())
}

/// The files of a split, or all, of all data sets.
fn paths<'a>(recipe: &'a Recipe, split: Option<&str>) -> Vec<&'a Path> {
    let files = recipe.data.each().flat_map(|data| {
        let (train, held_out) = match &data.validation {
            ValidationSource::File(files) => (data.train.paths(), files.paths()),
            ValidationSource::Fraction(_) => (data.train.paths(), &[][..]),
        };
        match split {
            Some("validation") if !held_out.is_empty() => [held_out, &[]],
            None => [train, held_out],
            _ => [train, &[]],
        }
    });
    files.flatten().map(PathBuf::as_path).collect()
}

/// What was evaluated, and the figures of the run's own last validation that are not among it.
fn all_results(trained: &Trained<'_>) -> Vec<CacheResult> {
    let mut results = trained.results.clone();
    let Some(recipe) = trained.recipe else { return results };
    let (split, cache) = ("validation".to_owned(), &recipe.kv_cache);
    let mut own = CacheResult::of_recipe(split, &cache.policy.name, cache.cache_length.to_string());
    let is_own =
        |other: &CacheResult| other.split == own.split && other.policy == own.policy && other.cache_length == own.cache_length;
    let figures = [("loss", last(trained, |line| line.eval_loss)), ("accuracy", last(trained, |line| line.eval_accuracy))];
    let is_known = |name: &str| {
        let mut figures = results.iter().filter(|result| is_own(result)).flat_map(|result| &result.figures);
        figures.any(|(known, ..)| known == name)
    };
    let new = figures.into_iter().filter(|(name, _)| !is_known(name));
    let new = new.filter_map(|(name, value)| Some((name.to_owned(), value?, None))).collect::<Vec<_>>();
    if let Some(index) = results.iter().position(is_own) {
        results[index].figures.splice(0..0, new);
    } else {
        own.figures = new;
        results.insert(0, own);
    }
    results
}

/// A result as the Hub's `model-index` has it; nothing without a figure.
fn in_model_index(result: &CacheResult, recipe: &Recipe, task: &str) -> Option<Value> {
    let CacheResult { split, policy, cache_length, figures } = result;
    let metric = |(name, value, samples): &(String, f64, Option<usize>)| {
        let (mut args, mut over) = (json!({ "policy": policy, "cache_length": cache_length }), String::new());
        if let Some(samples) = samples {
            args["samples"] = json!(samples);
            over = format!(", {}", counted(*samples, "sample"));
        }
        json!({ "type": name, "value": value, "name": format!("{name} ({policy}, {cache_length} slots{over})"), "args": args })
    };
    let metrics: Vec<Value> = figures.iter().filter(|(_, value, _)| value.is_finite()).map(metric).collect();
    let path = *paths(recipe, Some(split)).first()?;
    let (name, id) = (path.file_name()?.to_string_lossy(), cached_id(path, "datasets"));
    let dataset = json!({ "name": name, "type": id.as_deref().unwrap_or(&name), "split": split });
    (!metrics.is_empty()).then(|| json!({ "task": { "type": task }, "dataset": dataset, "metrics": metrics }))
}

/// A recipe as others may read it: its files by their names, without where on a machine they are.
fn without_places(recipe: &Recipe, base_model: &str) -> Recipe {
    let name = |path: &PathBuf| path.file_name().map_or_else(|| path.clone(), PathBuf::from);
    let mut shown = recipe.clone();
    shown.model.path = base_model.into();
    shown.model.adapter = shown.model.adapter.as_ref().map(name);
    shown.kv_cache.gates = shown.kv_cache.gates.as_ref().map(name);
    shown.data.change(&|data| {
        data.train = data.train.named_by(name);
        if let ValidationSource::File(paths) = &data.validation {
            data.validation = ValidationSource::File(paths.named_by(name));
        }
    });
    (shown.output_dir, shown.grad.scratch_dir) = (None, None);
    if let Some(TemplateChoice(choice)) = &mut shown.data.chat.chat_template
        && Path::new(choice).is_absolute()
    {
        *choice = name(&PathBuf::from(&*choice)).display().to_string();
    }
    shown
}

fn figures(trained: &Trained<'_>, recipe: Option<&Recipe>, base_model: &str, hash: &str) -> Table {
    let mut table = Table::new(&["figure", "value"]);
    table.row(&["base", &format!("`{base_model}`")]);
    table.row(&["hash of the base", &format!("`{hash}`")]);
    let (state, of_recipe) = (trained.state.as_ref(), |of: fn(&Recipe) -> String| recipe.map(of));
    table.figure("steps", state.map(|state| state.step));
    table.figure("tokens trained on", state.map(|state| state.total_tokens));
    let samples = state.and_then(|state| state.samples);
    table.figure("samples trained on, held out", samples.map(|samples| format!("{}, {}", samples.train, samples.validation)));
    table.figure("adapter", recipe.and_then(|recipe| recipe.lora.as_ref()).map(LoraRecipe::kind));
    let files = |recipe: &Recipe| recipe.data.each().map(|data| format!("`{}`", data.train)).collect::<Vec<_>>().join(", ");
    table.figure("data", of_recipe(files));
    table.figure("policy of the cache", of_recipe(|recipe| recipe.kv_cache.policy.to_string()));
    table.figure("cache length", of_recipe(|recipe| recipe.kv_cache.cache_length.to_string()));
    table.figure("chunk size", of_recipe(|recipe| recipe.kv_cache.wanted_chunk_size().to_string()));
    table.figure("buffer of the cache", of_recipe(|recipe| recipe.kv_cache.buffer.to_string()));
    table.figure("entries evicted in training", Evicted::over(&trained.metrics).words());
    let last = |value| last(trained, value).map(|value| format!("{value:.4}"));
    table.figure("training loss, last step", last(|line| line.loss));
    table.figure("validation loss", last(|line| line.eval_loss));
    table.figure("validation accuracy", last(|line| line.eval_accuracy));
    if let Some(best) = state.and_then(|state| state.best.as_ref()) {
        table.row(&[&format!("best validation {}", best.metric), &format!("{:.4} (step {})", best.value, best.step)]);
    }
    table
}

fn last(trained: &Trained<'_>, value: fn(&StepMetrics) -> Option<f64>) -> Option<f64> {
    trained.metrics.iter().rev().find_map(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_one_cache_stand_together_and_say_over_how_many_samples() {
        let overrides = ["kv_cache.policy=h2o", "kv_cache.cache_length=96"].map(str::to_owned);
        let recipe = Recipe::of_model(Path::new("model"), &overrides).unwrap().recipe;
        let of_answers = |policy: &str, samples| {
            let figures = vec![("f1".to_owned(), 0.5, Some(samples))];
            CacheResult { figures, ..CacheResult::of_recipe("validation".to_owned(), policy, "96".to_owned()) }
        };
        let trained = Trained {
            checkpoint: Path::new("run/final"),
            holds: TrainedWeights::Adapter,
            base: None,
            recipe: Some(&recipe),
            state: None,
            metrics: vec![StepMetrics { step: 2, eval_loss: Some(2.0), eval_accuracy: Some(0.25), ..StepMetrics::default() }],
            results: vec![of_answers("dense", 6), of_answers("{ h2o = { grace_period = 8 } }", 1)],
            chat_template: None,
        };
        let results = all_results(&trained);
        let shown = results.iter().filter_map(|result| in_model_index(result, &recipe, "text-generation"));
        let names = shown.flat_map(|result| result["metrics"].as_array().unwrap().clone());
        let names: Vec<String> = names.map(|metric| metric["name"].as_str().unwrap().to_owned()).collect();
        let of_h2o = ["loss (h2o, 96 slots)", "accuracy (h2o, 96 slots)", "f1 (h2o, 96 slots, 1 sample)"];
        assert_eq!(names, [&["f1 (dense, all slots, 6 samples)"][..], &of_h2o].concat());
        // What was evaluated goes before what the run has found, and is not there twice.
        let loss = ("loss".to_owned(), 1.0, Some(6));
        let evaluated = CacheResult { figures: vec![loss.clone()], ..results[1].clone() };
        let found = all_results(&Trained { results: vec![evaluated], ..trained });
        assert_eq!((found.len(), &found[0].figures[1]), (1, &loss));
    }
}
