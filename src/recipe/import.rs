//! A recipe in TOML made of the YAML of Axolotl or LLaMA-Factory. What the recipe's own tables know by another program's name is read by
//! them; the rest is told, and why it is not carried over.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value as Yaml};
use toml::Value;

use super::alias;
use super::diagnose::{Checked, RecipeError, RecipeLocation};
use super::plan::{Recipe, tables};
use super::suggest::ADVICE;
use super::table::dotted;
use super::tree::{Document, Node, RecipeSource, Spot};
use super::value::RecipeReader;
use crate::files::{self, FileKind};
use crate::units::{abridged, quoted};

/// What the recipe's tables do not know: names that mean a key of theirs here and something else in a recipe, or nothing there.
const MEANT: &[(&str, &str)] = &[
    ("optimizer", "optim"),
    ("lora_model_dir", "model.adapter"),
    ("adapter_name_or_path", "model.adapter"),
    ("val_set_size", "data.validation_fraction"),
    ("val_size", "data.validation_fraction"),
    ("adam_epsilon", "optimizer.eps"),
    ("eval_batch_size", "eval.micro_batch_size"),
    ("per_device_eval_batch_size", "eval.micro_batch_size"),
];

/// Why keys that begin so are not carried over.
const REASONS: &[(&str, &str)] = &[
    ("load_in_", "weights are not quantised"),
    ("quantization_", "weights are not quantised"),
    ("fp16", "f16 is not computed: `model.dtype` is `bf16` or `f32`"),
    ("template", "the model's own chat template is used; `data.chat_template` names another"),
    ("chat_template", "the model's own chat template is used; `data.chat_template` names a file"),
    ("type", "a recipe has one `data.format`, which is told from the rows if it is not written"),
    ("model_type", "`config.json` says it"),
    ("tokenizer_", "the tokenizer is the model's `tokenizer.json`"),
    ("trust_remote_code", "a model's own code is never run"),
    ("wandb_", "every run writes `metrics.jsonl` and TensorBoard events"),
    ("deepspeed", "several ranks are started by `kvtune launch`; `train.offload` spares the memory of a GPU"),
    ("fsdp", "several ranks are started by `kvtune launch`; `train.offload` spares the memory of a GPU"),
    ("flash_attn", "attention is chosen by the device"),
    ("flash_attention", "attention is chosen by the device"),
    ("evals_per_epoch", "`eval.interval` counts steps"),
    ("saves_per_epoch", "`checkpoint.save_interval` counts steps"),
    ("pad_to_sequence_len", "nothing is computed for pads"),
    ("dataset_prepared_path", "tokens are kept in the user's cache folder"),
    ("preprocessing_num_workers", "all cores make tokens"),
];

/// The data of a recipe whose original names none.
const NO_DATA: &str = "data.jsonl";

#[derive(Clone, Copy, PartialEq, Eq)]
enum OtherTrainer {
    Axolotl,
    LlamaFactory,
}

/// A recipe made of another program's configuration.
#[derive(Clone, Debug)]
pub struct Imported {
    /// The recipe in TOML.
    pub text: String,
    /// Why it is refused as it stands, if it is.
    pub refused: Option<RecipeError>,
}

impl Recipe {
    /// Makes a recipe of the YAML of Axolotl or LLaMA-Factory. `set` has keys (dotted) and values in place of the file's.
    pub fn import(path: &Path, set: &[(&str, &Path)]) -> Result<Imported, RecipeError> {
        let yaml = read(path)?;
        let mut import = Import::default();
        let trainer = if ["model_name_or_path", "finetuning_type", "stage"].iter().any(|key| yaml.contains_key(*key)) {
            OtherTrainer::LlamaFactory
        } else if yaml.contains_key("base_model") {
            OtherTrainer::Axolotl
        } else {
            let message = "neither `base_model` of Axolotl nor `model_name_or_path` of LLaMA-Factory is there".to_owned();
            return Err(refused(path, message, "name the YAML that the other trainer is started with"));
        };
        yaml.iter().for_each(|(key, value)| import.take(key, value, &yaml));
        for (key, path) in set {
            import.put(key, path.display().to_string().into());
        }
        import.fill(trainer);
        let text = import.to_toml(path, trainer);
        let refused = Self::parse(text.clone(), Path::new("command line"), &[]).err();
        Ok(Imported { text, refused })
    }
}

fn refused(path: &Path, message: String, hint: &str) -> RecipeError {
    RecipeError { message, place: Box::new(RecipeLocation::File(path.to_owned())), hint: Some(hint.to_owned()) }
}

/// The keys of a YAML file, which may be small and flat: what is deeper, or refers to itself again and again, is no configuration.
fn read(path: &Path) -> Checked<Map<String, Yaml>> {
    let text = files::read_text(path, FileKind::Recipe).map_err(|error| RecipeError::unread(path, &error))?;
    let budget = serde_saphyr::budget! { max_depth: 32, max_nodes: 20_000, max_aliases: 1000, max_documents: 1 };
    let alias_limits = serde_saphyr::alias_limits! {
        max_total_replayed_events: 20_000, max_replay_stack_depth: 8, max_alias_expansions_per_anchor: 1000,
    };
    let options = serde_saphyr::options! { budget: budget, alias_limits: alias_limits, with_snippet: false };
    match serde_saphyr::from_str_with_options(&text, options) {
        Ok(Yaml::Object(keys)) => Ok(keys),
        Ok(_) => Err(refused(path, "expected keys and values in YAML".to_owned(), "name the YAML of Axolotl or LLaMA-Factory")),
        Err(error) => Err(refused(path, format!("this is not valid YAML: {}", abridged(error)), "look at the indentation there")),
    }
}

/// What became of the keys, in their order.
#[derive(Default)]
struct Import {
    /// By dotted keys of the recipe.
    carried: Vec<(String, Value)>,
    /// Key, value, and why it is not carried over.
    left: Vec<(String, String, String)>,
    /// Keys that say nothing.
    off: Vec<String>,
}

impl Import {
    fn put(&mut self, key: &str, value: Value) {
        self.carried.retain(|(other, _)| other != key);
        self.carried.push((key.to_owned(), value));
    }

    fn has(&self, key: &str) -> bool {
        self.carried.iter().any(|(other, _)| other == key)
    }

    fn leave(&mut self, key: &str, value: &Yaml, why: &str) {
        self.left.push((key.to_owned(), value.to_string(), why.to_owned()));
    }

    fn take(&mut self, key: &str, value: &Yaml, all: &Map<String, Yaml>) {
        match (key, value) {
            ("datasets", Yaml::Array(sets)) => self.data_sets("data.train", sets),
            ("test_datasets", Yaml::Array(sets)) => self.data_sets("data.validation", sets),
            ("dataset" | "eval_dataset", Yaml::String(names)) => self.named_sets(key, names, all),
            ("adapter", Yaml::String(kind)) if kind == "lora" || kind == "qlora" => {
                self.put("train.weights", "adapter".into());
                if kind == "qlora" {
                    self.leave(key, value, "weights are not quantised; the adapter is LoRA");
                }
            }
            ("finetuning_type", Yaml::String(kind)) if kind == "lora" => {}
            ("finetuning_type", Yaml::String(kind)) if kind == "full" => self.put("train.weights", "all".into()),
            ("lora_target_linear", Yaml::Bool(true)) => self.put("lora.target_modules", "all-linear".into()),
            ("bf16", Yaml::Bool(true)) => self.put("model.dtype", "bf16".into()),
            ("bf16", Yaml::String(word)) if word == "auto" => self.put("model.dtype", "bf16".into()),
            ("stage", Yaml::String(stage)) if stage == "sft" => {}
            ("stage", Yaml::String(stage)) if stage == "pt" => self.put("data.format", "text".into()),
            ("mask_history", Yaml::Bool(true)) => self.put("data.train_on", "last".into()),
            // Where another program has its templates' names, a recipe has a file, a text or a name of the model's own.
            ("chat_template", Yaml::String(name)) if name == "tokenizer_default" => {}
            ("dataset_dir" | "do_train", _) => {}
            ("chat_template", Yaml::String(_)) => self.leave(key, value, reason(key)),
            _ => self.by_name(key, value),
        }
    }

    /// What the recipe's tables, or those here, know by this name.
    fn by_name(&mut self, key: &str, value: &Yaml) {
        let Some(toml) = to_toml(value).filter(|_| !is_empty(value)) else { return self.off.push(key.to_owned()) };
        let name = MEANT.iter().find(|(name, _)| *name == key).map_or(key, |(_, name)| name);
        // Lists are written with commas, and counts with a point.
        let list = toml.as_str().filter(|text| text.contains(',')).map(|text| text.split(',').map(str::trim).collect::<Vec<_>>());
        let count = toml.as_float().filter(|number| number.fract() == 0.0).map(|number| Value::from(number as i64));
        let spellings = [list.map(Value::from), Some(toml), count];
        let found: Vec<_> = spellings.into_iter().flatten().filter_map(|value| known(name, &value)).collect();
        let found = found.iter().find(|found| found.is_ok()).or(found.first()).cloned();
        match found {
            Some(Ok(carried)) => carried.into_iter().for_each(|(key, value)| self.put(&key, value)),
            _ if *value == Yaml::Bool(false) => self.off.push(key.to_owned()),
            Some(Err(error)) => self.leave(key, value, &error.message),
            None => self.leave(key, value, reason(key)),
        }
    }

    /// Axolotl's list of data sets.
    fn data_sets(&mut self, to: &str, sets: &[Yaml]) {
        let mut paths = Vec::new();
        for (index, set) in sets.iter().enumerate() {
            for (key, value) in set.as_object().into_iter().flatten() {
                match (key.as_str(), value) {
                    ("path", Yaml::String(path)) => paths.push(Value::from(path.as_str())),
                    ("field", Yaml::String(name)) if name == "text" => {}
                    ("field_messages", Yaml::String(name)) if name == "messages" => {}
                    ("type", Yaml::String(word)) if self.is_format(word) => {}
                    _ if is_empty(value) => {}
                    _ => self.leave(&format!("datasets[{index}].{key}"), value, reason(key)),
                }
            }
        }
        self.put_paths(to, paths);
    }

    /// Carries over the format of a data set, if all before had the same.
    fn is_format(&mut self, word: &str) -> bool {
        let word = if word == "completion" { "text" } else { word };
        let Some(Ok(format)) = known("data.format", &word.into()) else { return false };
        if !self.has("data.format") {
            self.carried.extend(format.clone());
        }
        format.iter().all(|format| self.carried.contains(format))
    }

    /// LLaMA-Factory's names of data sets, whose files stand in another file.
    fn named_sets(&mut self, key: &str, names: &str, all: &Map<String, Yaml>) {
        let folder = all.get("dataset_dir").and_then(Yaml::as_str).unwrap_or("data");
        let paths = names.split(',').map(|name| Value::from(format!("{folder}/{}.json", name.trim()))).collect();
        self.put_paths(if key == "dataset" { "data.train" } else { "data.validation" }, paths);
        self.leave(key, &names.into(), "`dataset_info.json` says which files these are: see whether the paths below are theirs");
    }

    fn put_paths(&mut self, to: &str, mut paths: Vec<Value>) {
        match paths.len() {
            0 => {}
            1 => self.put(to, paths.remove(0)),
            _ => self.put(to, Value::Array(paths)),
        }
    }

    /// What the other program does where nothing is written, and kvtune does not; and what contradicts itself here.
    fn fill(&mut self, trainer: OtherTrainer) {
        let rank = self.carried.iter().find(|(key, _)| key == "lora.r").and_then(|(_, r)| r.as_integer());
        if let Some(rank) = rank.filter(|_| trainer == OtherTrainer::LlamaFactory && !self.has("lora.alpha")) {
            self.put("lora.alpha", (2 * rank).into());
        }
        let on_too_long = if trainer == OtherTrainer::Axolotl { "drop" } else { "truncate" };
        let mut missing: Vec<(&str, Value)> = vec![
            ("data.train", NO_DATA.into()),
            ("data.on_too_long", on_too_long.into()),
            ("optimizer.weight_decay", 0.0.into()),
        ];
        // A warm-up of no steps leaves it to the ratio.
        self.carried.retain(|(key, value)| key != "optimizer.warmup_steps" || value.as_integer() != Some(0));
        match (self.has("optimizer.warmup_steps"), self.has("optimizer.warmup_ratio")) {
            (true, true) => self.drop_all("optimizer.warmup_ratio", "`warmup_steps` wins"),
            (false, false) => missing.push(("optimizer.warmup_ratio", 0.0.into())),
            _ => {}
        }
        if self.has("data.validation") {
            self.drop_all("data.validation_fraction", "the validation samples have files of their own");
        } else if !self.has("data.validation_fraction") {
            missing.push(("data.validation_fraction", 0.0.into()));
        }
        if trainer == OtherTrainer::Axolotl {
            missing.push(("train.weights", "all".into()));
        }
        missing.extend([("kv_cache.policy", "dense".into()), ("kv_cache.storage", "growing".into())]);
        for (key, value) in missing {
            if !self.has(key) {
                self.put(key, value);
            }
        }
        if self.carried.contains(&("train.weights".to_owned(), "all".into())) {
            self.drop_all("lora.", "all weights are trained");
        }
    }

    /// Takes keys that begin so back.
    fn drop_all(&mut self, start: &str, why: &str) {
        let (dropped, kept) = std::mem::take(&mut self.carried).into_iter().partition(|(key, _)| key.starts_with(start));
        self.carried = kept;
        self.left.extend(dropped.into_iter().map(|(key, value): (String, Value)| (key, value.to_string(), why.to_owned())));
    }

    fn to_toml(&self, path: &Path, trainer: OtherTrainer) -> String {
        let name = if trainer == OtherTrainer::Axolotl { "Axolotl" } else { "LLaMA-Factory" };
        let head = format!(
            "# Made of {name}'s `{}` by `kvtune init --from`. What is not written has kvtune's default.\n# Paths begin at this file's \
             folder. A data set or a model of the Hub is to be downloaded: `hf download NAME --local-dir DIR`.\n# All entries stay in \
             the cache, as there; `kvtune init --model DIR --data FILE` proposes a cache that evicts.\n",
            quoted(path.display())
        );
        let left =
            self.left.iter().map(|(key, value, why)| format!("# not carried over: {} = {}: {why}\n", quoted(key), quoted(value)));
        let off: Vec<String> = self.off.iter().map(quoted).collect();
        let off = (!off.is_empty()).then(|| format!("# off or empty there, and left out: {}\n", off.join(", ")));
        let mut names = tables().map(|(table, _)| table);
        // What stands above all tables comes first.
        names.rotate_right(1);
        let of_table = |table: &str| {
            let line = |(key, value): &(String, Value)| {
                let (of, key) = key.split_once('.').unwrap_or(("", key));
                (of == table).then(|| format!("{key} = {value}\n"))
            };
            let lines: String = self.carried.iter().filter_map(line).collect();
            let name = if table.is_empty() { String::new() } else { format!("[{table}]\n") };
            if lines.is_empty() { lines } else { format!("\n{name}{lines}") }
        };
        [head].into_iter().chain(left).chain(off).chain(names.map(of_table)).collect()
    }
}

/// What the recipe's tables make of a key: its dotted name and value there, or why they refuse it; `None` where they do not know it.
fn known(key: &str, value: &Value) -> Option<Checked<Vec<(String, Value)>>> {
    let mut document = Document { source: Arc::new(RecipeSource::default()), root: Node::table() };
    document.root.put(key, Spot::Code, value.clone().into());
    if let Err(error) = alias::apply(&mut document) {
        return Some(Err(error));
    }
    let reader = RecipeReader::new(&document);
    let mut found = Vec::new();
    for (table, keys) in &tables() {
        for key in keys {
            let name = dotted(table, &key.text.name);
            let Some(entry) = document.root.entry(&name) else { continue };
            if let Err(error) = (key.check)(&reader, &name, &key.text) {
                return Some(Err(error));
            }
            found.push((name, entry.node.to_value()));
        }
    }
    (!found.is_empty()).then_some(Ok(found))
}

fn reason(key: &str) -> &'static str {
    let advice = ADVICE.iter().find(|(name, _)| *name == key);
    let begins = || REASONS.iter().find(|(start, _)| key.starts_with(start));
    advice.or_else(begins).map_or("a recipe has no such key", |(_, why)| why)
}

/// Whether a value says nothing.
fn is_empty(value: &Yaml) -> bool {
    match value {
        Yaml::Null => true,
        Yaml::String(text) => text.is_empty(),
        Yaml::Array(items) => items.is_empty(),
        Yaml::Object(keys) => keys.is_empty(),
        Yaml::Bool(_) | Yaml::Number(_) => false,
    }
}

/// Nothing is left out but what is null.
fn to_toml(value: &Yaml) -> Option<Value> {
    Some(match value {
        Yaml::Null => return None,
        Yaml::Bool(value) => Value::from(*value),
        Yaml::Number(number) => number.as_i64().map_or_else(|| number.as_f64().map(Value::from), |number| Some(number.into()))?,
        Yaml::String(text) => Value::from(text.as_str()),
        Yaml::Array(items) => Value::Array(items.iter().filter_map(to_toml).collect()),
        Yaml::Object(keys) => Value::Table(keys.iter().filter_map(|(key, value)| Some((key.clone(), to_toml(value)?))).collect()),
    })
}
