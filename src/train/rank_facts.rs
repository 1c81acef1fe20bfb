//! What every rank must have alike before the first step: version, recipe, model, data.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use tch::Tensor;

use super::{RESOLVED_RECIPE, ResolvedRun};
use crate::data::{Dataset, Splits};
use crate::dist::ProcessGroup;
use crate::files;
use crate::model::{Model, fingerprint};
use crate::plan::Alternative;
use crate::recipe::Recipe;
use crate::store::content_of;
use crate::units::{Fault, abridged};

/// What is looked at, and what it is on a rank, in words.
type Facts = BTreeMap<String, String>;

pub(super) fn of_recipe(recipe: &Recipe) -> Facts {
    let mut facts = recipe.flat();
    facts.insert("version of kvtune".to_owned(), env!("CARGO_PKG_VERSION").to_owned());
    facts
}

/// The model's files, and what of an adapter is trained.
pub(super) fn of_model(hash: &str, model: &Model) -> Result<Facts, Fault> {
    let files = Facts::from([("files of the model".to_owned(), hash.to_owned())]);
    // All weights are those in the files.
    let trained = model.adapter().map(|_| of_trained(model)).transpose()?;
    let gates = model.has_gates().then(|| of_tensors("gates", model.gates())).transpose()?;
    Ok(files.into_iter().chain(trained.unwrap_or_default()).chain(gates.unwrap_or_default()).collect())
}

/// The numbers that are trained, to the bit.
pub(super) fn of_trained(model: &Model) -> Result<Facts, Fault> {
    of_tensors("what is trained", model.parameters().into_iter())
}

fn of_tensors(what: &str, tensors: impl Iterator<Item = (String, Tensor)>) -> Result<Facts, Fault> {
    let mut failed = None;
    let hash = files::hash_parts(tensors.map_while(|(_, tensor)| content_of(&tensor).map_err(|error| failed = Some(error)).ok()));
    failed.map_or_else(|| Ok(Facts::from([(what.to_owned(), hash)])), |error| Err(error.into()))
}

/// The samples, and what of the model's folder has made tokens of them.
pub(super) fn of_data(data: &Splits) -> Facts {
    let mut facts: Facts = data.origins.clone();
    let splits = [("training data", Some(&data.train)), ("validation data", data.validation.as_ref())];
    for (name, split) in splits.into_iter().filter_map(|(name, split)| Some((name, split?))) {
        facts.insert(name.to_owned(), in_words(split));
    }
    facts
}

fn in_words(data: &Dataset) -> String {
    let lengths = files::hash_parts(data.lengths().iter().map(|length| length.to_le_bytes()));
    format!("{} with {} samples, {lengths}", data.hash(), data.len())
}

/// Fails on all ranks where one evaluates something else than the first: version, recipe, model, adapter, samples, or what else is `asked`.
pub fn check_same_evaluation(
    world: &ProcessGroup,
    recipe: &Recipe,
    model: &Model,
    samples: &Dataset,
    asked: BTreeMap<String, String>,
) -> Result<(), Fault> {
    if world.size() == 1 {
        return Ok(());
    }
    let mut facts = of_recipe(recipe);
    facts.extend(of_model(&fingerprint(&recipe.model.path)?, model)?);
    facts.extend(asked.into_iter().chain([("samples".to_owned(), in_words(samples))]));
    check_same(world, "beginning an evaluation", facts)
}

/// A recipe with the tiling that the first rank resolves, and its plan: for steps that are no run's. Fails on all ranks of `world` where one has
/// another version or recipe than the first, or what else is `asked`.
pub fn resolved_alike(
    world: &ProcessGroup,
    recipe: &Recipe,
    asked: BTreeMap<String, String>,
    resolve: impl Fn(Recipe) -> Result<(Recipe, Alternative), Fault>,
) -> Result<(Recipe, Alternative), Fault> {
    let facts = of_recipe(recipe).into_iter().chain(asked).collect();
    check_same(world, "reading the recipe", facts)?;
    let others = |text| {
        let grad = Recipe::parse(text, Path::new(RESOLVED_RECIPE), &[])?.recipe.grad;
        resolve(Recipe { grad, ..recipe.clone() })
    };
    resolved_first(world, || resolve(recipe.clone()), |made| &made.0, others)
}

/// What the first rank resolves, while the others wait, and then resolve what `recipe` of it says.
fn resolved_first<T>(
    world: &ProcessGroup,
    first: impl FnOnce() -> Result<T, Fault>,
    recipe: impl FnOnce(&T) -> &Recipe,
    others: impl FnOnce(String) -> Result<T, Fault>,
) -> Result<T, Fault> {
    if world.size() == 1 {
        return first();
    }
    let mut resolved = None;
    let text = world.of_first("planning", || first().map(|made| recipe(resolved.insert(made)).to_toml()))?;
    resolved.map_or_else(|| others(text), Ok)
}

/// The recipe as the first rank resolves it: all run the same tiling, with texts of the same date, and tokenise data once.
pub(super) fn resolved_run(
    world: &ProcessGroup,
    recipe: &Recipe,
    dir: &Path,
    resolve: impl Fn(Recipe) -> Result<ResolvedRun, Fault>,
) -> Result<ResolvedRun, Fault> {
    let on_first = || {
        let mut run = resolve(recipe.clone())?;
        // A template that prints the date prints this one on every rank, and when the run is resumed.
        run.recipe.data.chat.chat_template_date = run.data.chat_template_date;
        Ok(run)
    };
    let others = |text| resolve(Recipe::parse(text, &dir.join(RESOLVED_RECIPE), &[])?.recipe);
    resolved_first(world, on_first, |run| &run.recipe, others)
}

/// Fails on all ranks where one has something else than the first.
pub(super) fn check_same(world: &ProcessGroup, at: &'static str, own: Facts) -> Result<(), Fault> {
    let all = world.agree(at, Ok(own))?;
    for (rank, other) in all.iter().enumerate().skip(1) {
        let names: BTreeSet<&String> = all[0].keys().chain(other.keys()).collect();
        let line = |name: &String| {
            let [first, own] = [&all[0], other].map(|facts| facts.get(name).map_or("not set", String::as_str));
            (first != own).then(|| format!("\n  `{name}`: {} on rank 0, {} on rank {rank}", abridged(first), abridged(own)))
        };
        let listed: String = names.into_iter().filter_map(line).collect();
        if !listed.is_empty() {
            let hint = "start every rank with the same recipe, model, data and version";
            return Err(Fault::data(format!("rank {rank} differs from rank 0:{listed}"), hint));
        }
    }
    Ok(())
}
