//! The model of the verbs that use one: a model, a run or a checkpoint, with the cache that it was trained with or another.

use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::PossibleValuesParser;
use tch::Device;

use super::recipe_file::noted;
use crate::cache::{self, policies};
use crate::checkpoint;
use crate::data::{ChatTemplates, InitialPartFinder, Tokenizer};
use crate::engine::{Engine, Settings};
use crate::export::PolicyFile;
use crate::files;
use crate::generation::{GenerationRules, Generator, SessionIdentity};
use crate::model::{Model, ModelConfig, fingerprint, read_peft};
use crate::recipe::{ModelRecipe, Recipe, Resolved, Storage, TrainedWeights};
use crate::report::console;
use crate::train;
use crate::units::Fault;

#[derive(Debug, Args)]
pub(super) struct ModelArgs {
    /// A run (its `final`, else its newest checkpoint), a checkpoint, a model directory, or the name of a model in the Hugging Face cache.
    #[arg(value_name = "MODEL|RUN|CHECKPOINT")]
    path: PathBuf,
    /// A PEFT adapter for the model. A checkpoint of a run brings the cache that it was trained with.
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Eviction policy, with its default parameters. Default: the policy and parameters of the training; `dense` for a model without a run.
    #[arg(long, value_name = "POLICY", value_parser = PossibleValuesParser::new(policies::names()))]
    policy: Option<String>,
    /// Cache slots per KV head. Default: those of the training.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    cache_length: Option<u32>,
    /// Override a key of the recipe.
    #[arg(long = "set", value_name = "a.b=c")]
    set: Vec<String>,
}

pub(super) struct LoadedModel {
    pub(super) recipe: Recipe,
    pub(super) model: Model,
    pub(super) tokenizer: Option<Tokenizer>,
    pub(super) engine: Engine,
    /// What finds the initial part of a prompt, where the policy keeps it.
    pub(super) initial_parts: Option<InitialPartFinder>,
    pub(super) adapter: Option<PathBuf>,
}

impl ModelArgs {
    /// The last part of the directory, or the whole name on the Hub.
    pub(super) fn name(&self) -> Option<String> {
        let on_hub = self.path.to_str().filter(|name| !self.path.exists() && files::is_hub_name(name));
        let in_folder = || Some(files::absolute(&self.path).file_name()?.to_string_lossy().into_owned());
        on_hub.map(str::to_owned).or_else(in_folder)
    }

    /// Loads the model with its adapter, and makes an engine with its cache.
    pub(super) fn load(&self, device: Device) -> Result<LoadedModel, Fault> {
        let (mut recipe, adapter) = self.recipe()?;
        train::set_numerics(&recipe, device);
        let mut model = train::base_model(&recipe, adapter.as_deref(), device)?;
        if model.config().num_classes.is_some() {
            let message = format!("`{}` scores classes, and writes no text", self.path.display());
            return Err(Fault::usage(message, "`kvtune evaluate` says how often it finds the right class"));
        }
        if let Some(dir) = &adapter {
            if let Some(file) = PolicyFile::find(dir)? {
                file.check_base(dir, &recipe.model.path, model.config())?;
            }
            train::load_adapter(&mut model, dir)?;
        }
        let is_set = sets(&self.set, "kv_cache.policy") || sets(&self.set, "kv_cache.cache_length");
        let is_other = is_set || self.policy.is_some() || self.cache_length.is_some();
        fit_chunks(&mut recipe, model.config(), is_other, &self.set)?;
        let tokenizer = Tokenizer::load_if_present(&recipe.model.path)?;
        let engine = train::engine(&recipe, model.config(), tokenizer.as_ref(), None)?;
        let rule = cache::initial_part(&recipe.kv_cache.policy)?;
        let initial_parts = rule.map(|rule| InitialPartFinder::new(&rule, tokenizer.as_ref())).transpose()?;
        Ok(LoadedModel { recipe, model, tokenizer, engine, initial_parts, adapter })
    }

    /// The recipe, and the directory of the adapter.
    fn recipe(&self) -> Result<(Recipe, Option<PathBuf>), Fault> {
        let path = files::model_dir(&self.path, self.revision()?.as_deref())?;
        let is_model = files::is_model(&path) && checkpoint::holds(&path).is_none();
        let (resolved, adapter) = if is_model {
            let model = files::absolute(&path);
            let (of_run, overrides) = (self.adapter.as_deref().and_then(recipe_beside), self.overrides(false));
            // What was exported has its cache beside it.
            let beside = self.adapter.as_deref().unwrap_or(&path);
            let mut resolved = match (of_run, PolicyFile::find(beside)?) {
                (Some(recipe), _) => Recipe::load(&recipe, &overrides)?,
                (None, Some(file)) => Resolved {
                    recipe: file.to_recipe(beside, &model, &self.overrides(file.policy == "dense"))?,
                    notes: Vec::new(),
                },
                (None, None) => Recipe::of_model(&model, &self.overrides(true))?,
            };
            resolved.recipe.model.path = model;
            (resolved, self.adapter.clone())
        } else {
            let is_run = checkpoint::holds(&self.path).is_some() || train::resolved_recipe_path(&self.path).is_ok();
            let found = if is_run { train::find_checkpoint(&self.path)? } else { return Err(self.unknown()) };
            let recipe = train::resolved_recipe_path(&found.run).map_err(|_| self.unknown())?;
            let mut resolved = Recipe::load(&recipe, &self.overrides(false))?;
            if found.holds == TrainedWeights::All {
                resolved.recipe.model.path = files::absolute(&found.dir);
            } else if self.adapter.is_some() {
                let message = format!("`{}` has an adapter of its own, and `--adapter` names another", self.path.display());
                return Err(Fault::usage(message, "name the base model instead of the run, or leave `--adapter` out"));
            }
            let own = (found.holds == TrainedWeights::Adapter).then_some(found.dir);
            (resolved, own.or_else(|| self.adapter.clone()))
        };
        let mut recipe = noted(resolved);
        recipe.grad = recipe.grad.closed();
        recipe.model.adapter = None;
        Ok((recipe, adapter))
    }

    /// The revision of a model that is named as on the Hub: as `--set` says, else the one that the adapter was trained on.
    fn revision(&self) -> Result<Option<String>, Fault> {
        let of_adapter = |adapter: &PathBuf| match recipe_beside(adapter) {
            Some(recipe) => recipe_revision(&recipe, &[], &self.path),
            None => Ok(read_peft(adapter)?.config.revision_of(&self.path)),
        };
        match (asked_revision(&self.set)?, &self.adapter) {
            (None, Some(adapter)) if !self.path.exists() => of_adapter(adapter),
            (asked, _) => Ok(asked),
        }
    }

    /// The error for a directory that is not what is needed.
    fn unknown(&self) -> Fault {
        let path = self.path.display();
        let (message, hint) = match checkpoint::holds(&self.path) {
            Some(TrainedWeights::Adapter) => {
                (format!("`{path}` is an adapter outside of a run"), "name its base model, and the adapter with `--adapter`")
            }
            _ => (
                format!("`{path}` is neither a model, nor a run, nor a checkpoint"),
                "a model directory has a `config.json`; a run is what `kvtune finetune-lora` or `finetune-full` has written",
            ),
        };
        let fetch = files::hub_name(&files::absolute(&self.path))
            .map(|name| format!("; `hf download {name}` fetches a model of that name"));
        Fault::usage(message, hint.to_owned() + &fetch.unwrap_or_default())
    }

    fn overrides(&self, is_dense: bool) -> Vec<String> {
        let is_dense = is_dense && !sets(&self.set, "kv_cache.policy");
        with_cache(&self.set, self.policy.as_deref(), self.cache_length, is_dense)
    }
}

/// The overrides of `--set`, and those of a cache that is asked for by arguments, which win. A dense one is as long as asked, or else grows, whatever
/// the recipe says, unless `--set` does; `is_dense` says whether the recipe's own is `dense`.
pub(super) fn with_cache(set: &[String], policy: Option<&str>, cache_length: Option<u32>, is_dense: bool) -> Vec<String> {
    let of_dense = match cache_length {
        Some(_) => vec![format!("kv_cache.storage={}", Storage::Preallocated.name())],
        // What grows has no fixed shapes.
        None => vec![format!("kv_cache.storage={}", Storage::Growing.name()), "kv_cache.static=false".to_owned()],
    };
    let of_dense = if policy.map_or(is_dense, |policy| policy == "dense") { of_dense } else { Vec::new() };
    let policy = policy.map(|policy| format!("kv_cache.policy={policy}"));
    let length = cache_length.map(|length| format!("kv_cache.cache_length={length}"));
    of_dense.into_iter().chain(set.iter().cloned()).chain(policy).chain(length).collect()
}

/// Resolves the size of chunks. Where arguments ask for another cache than the recipe's (`is_other`), the recipe's size does not contradict it.
pub(super) fn fit_chunks(recipe: &mut Recipe, config: &ModelConfig, is_other: bool, set: &[String]) -> Result<(), Fault> {
    let asked = recipe.kv_cache.chunk_size;
    if is_other && !sets(set, "kv_cache.chunk_size") && Settings::new(config, &recipe.kv_cache, &recipe.grad.closed()).is_err() {
        recipe.kv_cache.chunk_size = None;
    }
    recipe.kv_cache = Settings::resolved(config, &recipe.kv_cache, &recipe.grad)?;
    let (policy, chunk_size) = (&recipe.kv_cache.policy.name, recipe.kv_cache.chunk_size);
    if let (Some(asked), Some(chunk_size)) = (asked, chunk_size.filter(|_| chunk_size != asked)) {
        console::note_once(&format!(
            "chunks of {chunk_size} tokens: for the recipe's {asked} this cache (`{policy}`) is too small"
        ));
    }
    Ok(())
}

/// What `--set` says of a model's revision, by any of its names.
pub(super) fn asked_revision(set: &[String]) -> Result<Option<String>, Fault> {
    let is_of_it = |word: &&String| word.split('=').next().is_some_and(|key| key.contains("revision"));
    let words: Vec<String> = set.iter().filter(is_of_it).cloned().collect();
    Ok(Recipe::of_model(Path::new("."), &words)?.recipe.model.revision)
}

/// The revision at which a recipe names `model`, if it is its model.
pub(super) fn recipe_revision(recipe: &Path, set: &[String], model: &Path) -> Result<Option<String>, Fault> {
    let ModelRecipe { path, revision, .. } = Recipe::load(recipe, set)?.recipe.model;
    Ok(revision.filter(|_| files::cached_id(&path, "models").as_deref() == model.to_str()))
}

fn sets(set: &[String], key: &str) -> bool {
    set.iter().any(|word| word.trim_start().starts_with(key))
}

impl LoadedModel {
    pub(super) fn generator(&self, width: usize) -> Generator<'_> {
        Generator::new(&self.engine, &self.model, self.tokenizer.as_ref(), width).finding(self.initial_parts.as_ref())
    }

    /// The chat templates: what an argument says, else the recipe, else the model's own.
    pub(super) fn templates(&self, chosen: Option<&str>) -> Result<Option<ChatTemplates>, Fault> {
        let of_recipe = self.recipe.data.chat.chat_template.as_ref().map(|choice| &choice.0[..]);
        ChatTemplates::load(&self.recipe.model.path, chosen.or(of_recipe), None)
    }
}

pub(super) fn own_rules(dir: &Path) -> Result<GenerationRules, Fault> {
    let (rules, unknown) = GenerationRules::of_model(dir)?;
    if !unknown.is_empty() {
        console::note(&format!("`generation_config.json`: {} not known, and ignored", unknown.join(", ")));
    }
    Ok(rules)
}

/// What texts depend on, beside the rules by which they are generated: the recipe's model, cache and dtype, and the adapter.
pub(super) fn identity(recipe: &Recipe, adapter: Option<&Path>) -> Result<SessionIdentity, Fault> {
    let mut parts = vec![fingerprint(&recipe.model.path)?];
    parts.extend(recipe.model.rope_scaling.as_ref().map(|scaling| format!("{scaling:?}")));
    parts.extend(recipe.model.quantize.map(|form| form.name().to_owned()));
    let gates = train::gates_of(recipe, adapter).map(|file| files::hash_file(&file)).transpose()?;
    let mut cache = recipe.cache_keys();
    cache.extend(gates.map(|hash| ("kv_cache.gates".to_owned(), hash)));
    Ok(SessionIdentity {
        model: if let [files] = &parts[..] { files.clone() } else { files::hash_parts(&parts) },
        adapter: adapter.map(checkpoint::adapter_hash).transpose()?,
        cache,
        dtype: recipe.model.dtype.name().to_owned(),
    })
}

/// The recipe of the run that an adapter is a checkpoint of.
pub(super) fn recipe_beside(adapter: &Path) -> Option<PathBuf> {
    let found = train::find_checkpoint(adapter).ok()?;
    train::resolved_recipe_path(&found.run).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_weights_are_those_of_another_model() {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2");
        let of = |set: &[&str]| {
            let set: Vec<String> = set.iter().map(ToString::to_string).collect();
            identity(&Recipe::of_model(&model, &set).unwrap().recipe, None).unwrap().model
        };
        let all = [of(&[]), of(&["model.quantize=nf4"]), of(&["model.quantize=int8"])];
        assert_eq!(all[0], fingerprint(&model).unwrap());
        assert!(all[0] != all[1] && all[1] != all[2] && all[0] != all[2]);
    }
}
