//! The file: the cache by policy, lengths, chunks and buffer; positions; the base; and a recorded prompt.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::policy_trial::{Departures, PolicyTrial, RecordedTrial, first_difference, longest_prompt};
use crate::engine::Settings;
use crate::files;
use crate::model::{Model, ModelConfig, RopeSpec, fingerprint, has_fingerprint};
use crate::recipe::Recipe;
use crate::units::{Exit, Fault, abridged, quoted};

pub const KV_POLICY: &str = "kv_policy.json";
const FORMAT: &str = "kvtune kv policy";
const VERSION: u32 = 1;
/// Keys count from the first token of the sequence, and stay where they are when others leave.
const ABSOLUTE: &str = "absolute";
/// The most slots that a recipe may ask for.
const MAX_SLOTS: usize = 1 << 40;
/// Chunks evict nothing until then.
const PREFILL: &str = "until the smallest cache is full";

/// The cache that a model was trained with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyFile {
    pub format: String,
    pub version: u32,
    /// A name, or a table with one: its parameters.
    pub policy: Value,
    /// Slots by layer and KV head; of a layer with a sliding window, those of its window.
    pub cache_lengths: Vec<Vec<usize>>,
    /// The sliding windows by layer; a layer that has one has a rolling cache in place of the policy.
    pub windows: Vec<Option<usize>>,
    /// First tokens that never leave, by layer.
    pub sinks: Vec<usize>,
    /// Last tokens that never leave, by layer.
    pub grace: Vec<usize>,
    /// Tokens that are run together, and choose together who leaves.
    pub chunk_size: usize,
    #[serde(default = "one_by_one")]
    pub decode_block: usize,
    /// Where chunks end: `plain` or `reference`.
    pub chunking: String,
    pub prefill: String,
    /// How an entry is stored after its own chunk has attended.
    pub buffer: String,
    pub positions: String,
    /// Rotary embeddings by layer, as trained; `null` where a layer knows no position.
    pub rope: Vec<Option<RopeSpec>>,
    /// What the recipe had in place of the model's own scaling.
    pub rope_scaling: Option<Value>,
    pub base_hash: String,
    /// What an implementation is tested with.
    pub conformance: RecordedTrial,
}

/// What older files do not say.
fn one_by_one() -> usize {
    1
}

impl PolicyFile {
    /// That of a run: `trial` is made of the same recipe.
    pub fn record(recipe: &Recipe, model: &Model, base_hash: &str, trial: &PolicyTrial) -> Result<Self, Fault> {
        let (config, kv) = (model.config(), &recipe.kv_cache);
        let settings = Settings::new(config, kv, &recipe.grad.closed())?;
        let layers = || 0..config.num_layers();
        let by_head = |(slots, heads): (usize, usize)| vec![slots; heads];
        Ok(Self {
            format: FORMAT.into(),
            version: VERSION,
            policy: json!(kv.policy.to_value()),
            cache_lengths: config.cache_lengths(&kv.cache_length).into_iter().zip(config.num_kv_heads()).map(by_head).collect(),
            windows: windows(config),
            sinks: layers().map(|layer| settings.policy(layer).traits().sinks).collect(),
            grace: layers().map(|layer| settings.policy(layer).traits().grace).collect(),
            chunk_size: settings.chunk_size(),
            decode_block: kv.decode_block,
            chunking: kv.chunking.name().into(),
            prefill: PREFILL.into(),
            buffer: kv.buffer.name().into(),
            positions: ABSOLUTE.into(),
            rope: ropes(config),
            rope_scaling: recipe.model.rope_scaling.as_ref().map(|scaling| json!(scaling)),
            base_hash: base_hash.into(),
            conformance: trial.record(model, recipe.model.dtype.name())?,
        })
    }

    /// Reads the file of a checkpoint or an export, if it has one.
    pub fn find(dir: &Path) -> Result<Option<Self>, Fault> {
        let path = dir.join(KV_POLICY);
        if !path.exists() {
            return Ok(None);
        }
        let object: Map<String, Value> = files::read_json(&path)?;
        // Before the rest, which another version may not have.
        let [format, version] = ["format", "version"].map(|key| object.get(key).unwrap_or(&Value::Null));
        let (found, expected) = (format!("{format} of version {version}"), format!("{} of version {VERSION}", json!(FORMAT)));
        if found != expected {
            let message = format!("`{}` is {}, expected {expected}", abridged(path.display()), quoted(found));
            return Err(Fault::data(message, "read it with the version of kvtune that wrote it"));
        }
        let file: Self = serde_json::from_value(Value::Object(object)).map_err(|error| {
            let message = format!("`{}` is no description of a cache: {}", abridged(path.display()), abridged(error));
            Fault::data(message, "export the run again")
        })?;
        for (key, found, expected) in [("positions", &file.positions, ABSOLUTE), ("prefill", &file.prefill, PREFILL)] {
            if found != expected {
                return Err(unfit(&path, key, &format!("{found:?}"), &format!("{expected:?}")));
            }
        }
        file.check_sizes(&path)?;
        Ok(Some(file))
    }

    /// Fails where the file contradicts itself, or has a prompt that no recording has: before anything is made of it.
    fn check_sizes(&self, path: &Path) -> Result<(), Fault> {
        let RecordedTrial { prompt, cache_length: slots, chunk_size: chunk, left, .. } = &self.conformance;
        // A layer with a window does not tell how many slots the policy would have had there.
        let own = self.cache_lengths.iter().flatten().copied().max().filter(|_| self.windows.iter().all(Option::is_none));
        let layers = self.cache_lengths.len()..=self.cache_lengths.len();
        for (key, unit, found, range) in [
            ("windows", "layers", self.windows.len(), layers.clone()),
            ("sinks", "layers", self.sinks.len(), layers.clone()),
            ("grace", "layers", self.grace.len(), layers.clone()),
            ("rope", "layers", self.rope.len(), layers.clone()),
            ("conformance.left", "layers", left.len(), layers),
            ("conformance.cache_length", "slots", *slots, 1..=own.unwrap_or(MAX_SLOTS)),
            ("conformance.chunk_size", "tokens", *chunk, 1..=self.chunk_size),
            ("conformance.prompt", "tokens", prompt.len(), 2..=longest_prompt(*slots)),
        ] {
            if !range.contains(&found) {
                let expected = format!("{} to {}", range.start(), range.end());
                return Err(unfit(path, key, &format!("{found} {unit}"), &expected));
            }
        }
        Ok(())
    }

    /// Reads the file where there must be one; see [`Self::find`].
    pub fn read(dir: &Path) -> Result<Self, Fault> {
        Self::find(dir)?.ok_or_else(|| {
            let message = format!("there is no `{KV_POLICY}` in `{}`", abridged(dir.display()));
            Fault::data(message, "name a checkpoint of a run or an export, for example `runs/my/final`")
        })
    }

    /// What a recipe would say of the model in `model_dir`, in the dtype of the recording, and of its cache; with overrides as behind `--set`.
    pub fn to_recipe(&self, dir: &Path, model_dir: &Path, overrides: &[String]) -> Result<Recipe, Fault> {
        let path = dir.join(KV_POLICY);
        let wrong = |key, found: String| unfit(&path, key, &found, "as in a recipe");
        let converted = |key, value: &Value| toml::Value::try_from(value).map_err(|_| wrong(key, value.to_string()));
        let slots = self.cache_lengths.iter().map(|heads| heads.first().map(|&slots| slots as i64));
        let slots: Vec<i64> = slots.collect::<Option<_>>().ok_or_else(|| wrong("cache_lengths", "empty in a layer".into()))?;
        // One number where layers without windows have the same, as most recipes have it: a session saved by one goes on with the other.
        let mut of_policy = slots.iter().zip(&self.windows).filter(|(_, window)| window.is_none()).map(|(&slots, _)| slots);
        let shared = of_policy.next().filter(|first| of_policy.all(|slots| slots == *first));
        let mut values: Vec<(&str, toml::Value)> = vec![
            ("model.path", model_dir.display().to_string().into()),
            ("model.dtype", self.conformance.dtype.clone().into()),
            ("kv_cache.policy", converted("policy", &self.policy)?),
            ("kv_cache.cache_length", shared.map_or_else(|| slots.into(), toml::Value::from)),
            ("kv_cache.chunk_size", (self.chunk_size as i64).into()),
            ("kv_cache.decode_block", (self.decode_block as i64).into()),
            ("kv_cache.chunking", self.chunking.clone().into()),
            ("kv_cache.buffer", self.buffer.clone().into()),
            ("data.train", "none".into()),
            ("data.format", "tokens".into()),
        ];
        if let Some(scaling) = &self.rope_scaling {
            values.push(("model.rope_scaling", converted("rope_scaling", scaling)?));
        }
        let lines: Vec<String> = values.iter().map(|(key, value)| format!("{key} = {value}\n")).collect();
        Ok(Recipe::parse(lines.concat(), &path, overrides)?.recipe)
    }

    /// Runs the recorded prompt with a model; the file lies in `dir`. Returns how many tokens left, over all layers and heads.
    pub fn check(&self, dir: &Path, model: &Model) -> Result<usize, Fault> {
        let path = dir.join(KV_POLICY);
        self.check_model(dir, model.config())?;
        let recipe = self.to_recipe(dir, Path::new("."), &[])?;
        let RecordedTrial { cache_length, chunk_size, left, .. } = &self.conformance;
        let (kv, grad, recorded) = (&recipe.kv_cache, &recipe.grad, Some(&self.conformance));
        let trial = PolicyTrial::new(model.config(), kv, grad, *cache_length, Some(*chunk_size), recorded)?;
        let found = trial.run(model)?;
        let shape = |of: &Departures| of.iter().map(|heads| heads.iter().map(Vec::len).collect()).collect::<Vec<Vec<usize>>>();
        if shape(&found) != shape(left) {
            let (found, expected) = (format!("of the shape {:?}", shape(left)), format!("{:?}", shape(&found)));
            return Err(unfit(&path, "conformance.left", &found, &expected));
        }
        if let Some(what) = first_difference(left, &found) {
            return Err(Fault::new(Exit::Failed, format!("the cache departs from `{}`: {what}", abridged(path.display())))
                .with_hint(
                    "the file was recorded in the dtype that it names, with weights packed as the run's `model.quantize` says: \
                     in narrow ones, other devices, merged and unpacked weights may decide between near scores otherwise",
                ));
        }
        Ok(found.iter().flatten().flatten().flatten().count())
    }

    /// Fails where the file speaks of another base than the model in `base`; it lies in `dir`.
    pub fn check_base(&self, dir: &Path, base: &Path, config: &ModelConfig) -> Result<(), Fault> {
        if !has_fingerprint(base, &self.base_hash)? {
            let found = fingerprint(base)?;
            let (path, key) = (dir.join(KV_POLICY), "base_hash");
            let expected = format!("{found}, as of `{}`", base.display());
            return Err(unfit(&path, key, &self.base_hash, &expected));
        }
        self.check_model(dir, config)
    }

    fn check_model(&self, dir: &Path, config: &ModelConfig) -> Result<(), Fault> {
        let refuse = |key, found: String, expected: String| Err(unfit(&dir.join(KV_POLICY), key, &found, &expected));
        let heads: Vec<usize> = self.cache_lengths.iter().map(Vec::len).collect();
        if heads != config.num_kv_heads() {
            return refuse("cache_lengths", format!("for {heads:?} heads"), format!("{:?} by layer", config.num_kv_heads()));
        }
        if let Some(lengths) = self.cache_lengths.iter().find(|lengths| lengths.iter().any(|length| *length != lengths[0])) {
            return refuse("cache_lengths", format!("{lengths:?} in a layer"), "one length for the heads of a layer".into());
        }
        let (windows, ropes) = (windows(config), ropes(config));
        if self.windows != windows {
            return refuse("windows", json!(self.windows).to_string(), json!(windows).to_string());
        }
        if let Some(layer) = (0..ropes.len()).find(|&layer| self.rope.get(layer) != Some(&ropes[layer])) {
            let found = self.rope.get(layer).map_or_else(|| "missing".into(), |rope| json!(rope).to_string());
            return refuse("rope", found, format!("{} in layer {layer}", json!(ropes[layer])));
        }
        let (prompt, vocab_size, longest) = (&self.conformance.prompt, config.vocab_size, config.trained_positions());
        if prompt.len() > longest || prompt.iter().any(|&id| id as usize >= vocab_size) {
            let expected = format!("at most {longest}, each below {vocab_size}");
            return refuse("conformance.prompt", format!("{} tokens", prompt.len()), expected);
        }
        let (begin, end) = self.conformance.initial_part;
        if begin > end || end > prompt.len() {
            return refuse("conformance.initial_part", format!("{begin} to {end}"), format!("within {} tokens", prompt.len()));
        }
        let recipe = self.to_recipe(dir, Path::new("."), &[])?;
        let settings = Settings::new(config, &recipe.kv_cache, &recipe.grad.closed())?;
        let traits = || (0..config.num_layers()).map(|layer| settings.policy(layer).traits());
        let (sinks, grace) = (traits().map(|own| own.sinks).collect(), traits().map(|own| own.grace).collect());
        for (key, found, expected) in [("sinks", &self.sinks, sinks), ("grace", &self.grace, grace)] {
            let expected: Vec<usize> = expected;
            if *found != expected {
                return refuse(key, format!("{found:?}"), format!("{expected:?}, as the policy has them"));
            }
        }
        Ok(())
    }
}

fn windows(config: &ModelConfig) -> Vec<Option<usize>> {
    config.layers.iter().map(|layer| layer.attention.rule.window).collect()
}

fn ropes(config: &ModelConfig) -> Vec<Option<RopeSpec>> {
    config.layers.iter().map(|layer| layer.attention.rope.clone()).collect()
}

/// What the file says does not fit the model, or itself.
fn unfit(path: &Path, key: &str, found: &str, expected: &str) -> Fault {
    let message = format!("`{key}` in `{}` is {}, expected {expected}", abridged(path.display()), quoted(found));
    Fault::data(message, "the file must belong to the model that is tested: take it from its checkpoint again")
}
