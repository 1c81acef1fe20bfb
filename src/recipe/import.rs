//! A recipe in TOML made of the YAML of Axolotl or LLaMA-Factory. What the recipe's own tables know by another program's name is read by
//! them; the rest is told, and why it is not carried over.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value as Yaml};
use toml::Value;

use super::alias;
use super::diagnose::{Checked, of_file};
use super::plan::{Recipe, TABLES, dotted_keys};
use super::refusals::Refusals;
use super::suggest::ADVICE;
use super::tree::{Document, Node, RecipeSource, Spot};
use crate::units::{Exit, Fault, abridged, quoted};

/// Keys that say which kind of training it is, and the words for kinds that there are here. Another kind is not carried over in part.
const KINDS: &[(&str, &[&str])] = &[
    ("rl", &[]),
    ("reward_model", &[]),
    ("process_reward_model", &[]),
    ("stage", &["sft", "pt"]),
    ("finetuning_type", &["lora", "full"]),
    ("adapter", &["lora", "qlora"]),
];

const COLUMNS: &str = "columns are told from the rows: `kvtune data` shows them";

/// Why keys that begin so are not carried over.
const REASONS: &[(&str, &str)] = &[
    ("template", "the model's own chat template is used; `data.chat_template` names another"),
    ("chat_template", "the model's own chat template is used; `data.chat_template` names a file"),
    ("type", "a recipe has one `data.format`, which is told from the rows if it is not written"),
    ("model_type", "`config.json` says it"),
    ("trust_remote_code", "a model's own code is never run"),
    ("wandb_", "every run writes `metrics.jsonl` and TensorBoard events"),
    ("deepspeed", "several ranks are started by `kvtune launch`; `train.offload` spares the memory of a GPU"),
    ("evals_per_epoch", "`eval.interval` counts steps"),
    ("saves_per_epoch", "`checkpoint.save_interval` counts steps"),
    ("pad_to_sequence_len", "nothing is computed for pads"),
    ("field_", COLUMNS),
    ("message_", COLUMNS),
];

impl Recipe {
    /// Makes a recipe of the YAML of Axolotl or LLaMA-Factory: its text, and why that is refused as it stands, if it is. `set` has keys
    /// (dotted) and values in place of the file's.
    pub fn import(path: &Path, set: &[(&str, &Path)]) -> Result<(String, Option<Fault>), Fault> {
        let yaml = read(path)?;
        let is_axolotl = !["model_name_or_path", "finetuning_type", "stage"].iter().any(|key| yaml.contains_key(*key));
        if is_axolotl && !yaml.contains_key("base_model") {
            let message = "neither `base_model` of Axolotl nor `model_name_or_path` of LLaMA-Factory is there".to_owned();
            return Err(of_file(path, message, "name the YAML that the other trainer is started with"));
        }
        for (key, words) in KINDS {
            let kind = yaml.get(*key).filter(|value| !is_empty(value) && **value != Yaml::Bool(false)).map(word);
            if let Some(kind) = kind.filter(|kind| !words.contains(&kind.as_str())) {
                let message = format!("`{key}: {}` is a kind of training that kvtune does not have", quoted(kind));
                return Err(of_file(
                    path,
                    message,
                    "kvtune trains an adapter (LoRA), or all weights, to predict texts or their classes",
                ));
            }
        }
        let mut import = Import::default();
        yaml.iter().for_each(|(key, value)| import.take(key, value, &yaml));
        for (key, path) in set {
            import.put(key, path.display().to_string());
        }
        import.fill(is_axolotl);
        let text = import.to_toml(path, if is_axolotl { "Axolotl" } else { "LLaMA-Factory" });
        let refused = Self::parse(text.clone(), Path::new("command line"), &[]).err();
        Ok((text, refused))
    }
}

/// The keys of a YAML file, which may be small and flat: what is deeper, or refers to itself again and again, is no configuration.
fn read(path: &Path) -> Checked<Map<String, Yaml>> {
    let text = Recipe::read(path)?;
    let budget = serde_saphyr::budget! { max_depth: 32, max_nodes: 20_000, max_aliases: 1000, max_documents: 1 };
    let alias_limits = serde_saphyr::alias_limits! {
        max_total_replayed_events: 20_000, max_replay_stack_depth: 8, max_alias_expansions_per_anchor: 1000,
    };
    let options = serde_saphyr::options! { budget: budget, alias_limits: alias_limits, with_snippet: false };
    match serde_saphyr::from_str_with_options(&text, options) {
        Ok(Yaml::Object(keys)) => Ok(keys),
        Ok(_) => Err(of_file(path, "expected keys and values in YAML".to_owned(), "name the YAML of Axolotl or LLaMA-Factory")),
        Err(error) => Err(of_file(
            path,
            format!("this is not valid YAML: {}", abridged(error)),
            "`--from` takes the YAML of Axolotl or LLaMA-Factory; in such a file, check the indentation of that line",
        )),
    }
}

/// What became of the keys, in their order.
#[derive(Default)]
struct Import {
    /// Values with the dotted keys of the recipe.
    carried: Vec<(String, Value)>,
    /// Key, value, and why it is not carried over.
    left: Vec<(String, String, String)>,
    off: Vec<String>,
}

impl Import {
    fn put(&mut self, key: &str, value: impl Into<Value>) {
        self.carried.retain(|(other, _)| other != key);
        self.carried.push((key.to_owned(), value.into()));
    }

    fn has(&self, key: &str) -> bool {
        self.carried.iter().any(|(other, _)| other == key)
    }

    fn leave(&mut self, key: &str, value: &Yaml, why: &str) {
        self.left.push((key.to_owned(), value.to_string(), why.to_owned()));
    }

    fn take(&mut self, key: &str, value: &Yaml, all: &Map<String, Yaml>) {
        match (key, &word(value)[..]) {
            ("datasets" | "test_datasets" | "dataset" | "eval_dataset", _) if is_empty(value) => {}
            ("datasets", _) if value.is_array() => self.data_sets("data.train", value),
            ("test_datasets", _) if value.is_array() => self.data_sets("data.validation", value),
            ("dataset" | "eval_dataset", names) if value.is_string() => self.named_sets(key, names, all),
            // Where another program has its templates' names, a recipe has a file, a text or a name of the model's own.
            ("chat_template", "tokenizer_default")
            | ("finetuning_type", "lora")
            | ("stage", "sft")
            | ("do_train" | "dataset_dir", _) => {}
            ("adapter", "lora") => self.put("train.weights", "adapter"),
            ("adapter", "qlora") => {
                self.put("train.weights", "adapter");
                self.put("model.quantize", of_four_bits(all));
            }
            ("load_in_4bit", "true") => self.put("model.quantize", of_four_bits(all)),
            ("load_in_8bit", "true") => self.put("model.quantize", "int8"),
            ("quantization_bit", "4") if is_bitsandbytes(all) => self.put("model.quantize", of_four_bits(all)),
            ("quantization_bit", "8") if is_bitsandbytes(all) => self.put("model.quantize", "int8"),
            ("quantization_method" | "quantization_type" | "double_quantization", _) if is_bitsandbytes(all) => {}
            ("finetuning_type", "full") => self.put("train.weights", "all"),
            ("stage", "pt") => self.put("data.format", "text"),
            ("adam_beta1" | "adam_beta2", _) if value.is_number() => {
                let beta = |key: &str, default| all.get(key).and_then(Yaml::as_f64).unwrap_or(default);
                self.put("optimizer.betas", vec![beta("adam_beta1", 0.9), beta("adam_beta2", 0.999)]);
            }
            ("warmup_steps" | "warmup_ratio", _) if is_constant(all) && value.as_f64().is_some_and(|warmup| warmup > 0.0) => {
                self.leave(key, value, "`constant` there is without a warm-up, and `constant_with_warmup` has one");
            }
            // Since Transformers 5 a number below 1 is a part of all steps.
            ("warmup_steps", _) if value.as_f64().is_some_and(|steps| steps > 0.0 && steps < 1.0) => {
                self.by_name("warmup_ratio", value);
            }
            ("mask_history", "true") => self.put("data.train_on", "last"),
            ("chat_template", _) if !is_empty(value) => self.leave(key, value, reason(key)),
            _ => self.by_name(key, value),
        }
    }

    /// What the recipe's tables know by this name.
    fn by_name(&mut self, key: &str, value: &Yaml) {
        let Some(toml) = Value::try_from(value).ok().filter(|_| !is_empty(value)) else { return self.off.push(key.to_owned()) };
        // At the top of a recipe that is a table.
        let name = if key == "optimizer" { "optim" } else { key };
        // Lists are written with commas, and counts with a point.
        let list = toml.as_str().filter(|text| text.contains(',')).map(|text| text.split(',').map(str::trim).collect::<Vec<_>>());
        let count = toml.as_float().filter(|number| number.fract() == 0.0).map(|number| Value::from(number as i64));
        let spellings = [list.map(Value::from), Some(toml), count];
        let found: Vec<_> = spellings.into_iter().flatten().filter_map(|value| known(name, &value)).collect();
        let best = found.iter().position(Result::is_ok).unwrap_or(0);
        match found.into_iter().nth(best) {
            Some(Ok(carried)) => carried.into_iter().for_each(|(key, value)| self.put(&key, value)),
            _ if *value == Yaml::Bool(false) => self.off.push(key.to_owned()),
            Some(Err(error)) => self.leave(key, value, &error.to_string()),
            None => self.leave(key, value, reason(key)),
        }
    }

    /// Axolotl's list of data sets.
    fn data_sets(&mut self, to: &str, sets: &Yaml) {
        let mut paths: Vec<&str> = Vec::new();
        for (index, set) in sets.as_array().into_iter().flatten().enumerate() {
            for (key, value) in set.as_object().into_iter().flatten() {
                match (key.as_str(), value) {
                    ("path", Yaml::String(path)) => paths.push(path),
                    ("field", Yaml::String(name)) if name == "text" => {}
                    ("field_messages", Yaml::String(name)) if name == "messages" => {}
                    ("type", Yaml::String(word)) if self.is_format(word) => {}
                    _ if is_empty(value) => {}
                    ("split", _) => self.leave(&format!("datasets[{index}].split"), value, "all rows of the files are read"),
                    _ => self.leave(&format!("datasets[{index}].{key}"), value, reason(key)),
                }
            }
        }
        self.put(to, paths);
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
        let paths: Vec<String> = names.split(',').map(|name| format!("{folder}/{}.json", name.trim())).collect();
        self.put(if key == "dataset" { "data.train" } else { "data.validation" }, paths);
        self.leave(key, &names.into(), "`dataset_info.json` says which files these are: see whether the paths below are theirs");
    }

    fn put_default(&mut self, key: &str, value: impl Into<Value>) {
        if !self.has(key) {
            self.put(key, value);
        }
    }

    /// What the other program does where nothing is written, and kvtune does not; and what contradicts itself here.
    fn fill(&mut self, is_axolotl: bool) {
        let carried = |key: &str| self.carried.iter().find(|(other, _)| other == key).and_then(|(_, value)| value.as_integer());
        let (rank, max_steps) = (carried("lora.r"), carried("train.max_steps"));
        // The other trainers repeat the data until `max_steps`, whatever the epochs.
        if let Some(steps) = max_steps {
            self.drop_all("train.epochs", "`max_steps` wins");
            self.put("train.epochs", steps);
        }
        if is_axolotl {
            self.put_default("train.weights", "all");
        } else {
            if let Some(rank) = rank {
                self.put_default("lora.alpha", rank.saturating_mul(2));
            }
            // As Transformers' `TrainingArguments`.
            self.put_default("train.micro_batch_size", 8);
            self.put_default("train.epochs", 3);
            self.put_default("optimizer.learning_rate", 5e-5);
            self.put_default("optimizer.schedule", "linear");
        }
        // A warm-up of no steps leaves it to the ratio.
        self.carried.retain(|(key, value)| key != "optimizer.warmup_steps" || value.as_integer() != Some(0));
        if self.has("optimizer.warmup_steps") {
            self.drop_all("optimizer.warmup_ratio", "`warmup_steps` wins");
        } else {
            self.put_default("optimizer.warmup_ratio", 0.0);
        }
        if self.has("data.validation") {
            self.drop_all("data.validation_fraction", "the validation samples have files of their own");
        } else {
            self.put_default("data.validation_fraction", 0.0);
        }
        self.put_default("data.train", "data.jsonl");
        self.put_default("data.max_seq_length", if is_axolotl { 512 } else { 2048 });
        self.put_default("data.on_too_long", if is_axolotl { "drop" } else { "truncate" });
        self.put_default("optimizer.weight_decay", 0.0);
        self.put_default("kv_cache.policy", "dense");
        self.put_default("kv_cache.storage", "growing");
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

    fn to_toml(&self, path: &Path, trainer: &str) -> String {
        let head = format!(
            "# Made of {trainer}'s `{}` by `kvtune init --from`. What is not written has kvtune's default.\n# Paths begin at this file's \
             folder. A data set or a model of the Hub is to be downloaded: `hf download NAME --local-dir DIR`.\n# All entries stay in \
             the cache, as there; `kvtune init --model DIR --data FILE` proposes a cache that evicts.\n",
            quoted(path.display())
        );
        let left =
            self.left.iter().map(|(key, value, why)| format!("# not carried over: {} = {}: {why}\n", quoted(key), quoted(value)));
        let off: Vec<String> = self.off.iter().map(quoted).collect();
        let off = (!off.is_empty()).then(|| format!("# off or empty there, and left out: {}\n", off.join(", ")));
        // What stands above all tables comes first.
        let names = TABLES.iter().map(|(table, _)| *table).cycle().skip(TABLES.len() - 1).take(TABLES.len());
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
    let mut refusals = Refusals::default();
    let notes = alias::apply(&mut document, &mut refusals);
    if let Some(error) = refusals.into_first() {
        return Some(Err(error));
    }
    let found = dotted_keys().filter_map(|(name, key)| {
        let value = document.root.entry(&name)?.node.to_value();
        Some((key.check)(&document, &name, key).map(|()| (name, value)))
    });
    match found.collect::<Checked<Vec<_>>>() {
        Ok(found) if found.is_empty() => {
            notes.first().map(|note| Err(Fault::new(Exit::Usage, note.trim_start_matches("code: "))))
        }
        found => Some(found),
    }
}

fn reason(key: &str) -> &'static str {
    let advice = ADVICE.iter().find(|(name, _)| *name == key);
    let begins = || REASONS.iter().find(|(start, _)| key.starts_with(start));
    advice.or_else(begins).map_or("a recipe has no such key", |(_, why)| why)
}

/// How bitsandbytes packs weights in 4 bits for these programs: with nested scales, unless LLaMA-Factory's keys say otherwise.
fn of_four_bits(all: &Map<String, Yaml>) -> &'static str {
    let says = |key: &str, expected: &str| all.get(key).is_some_and(|value| word(value) == expected);
    if says("quantization_type", "fp4") {
        return "fp4";
    }
    if says("double_quantization", "false") { "nf4" } else { "nf4-double" }
}

fn is_bitsandbytes(all: &Map<String, Yaml>) -> bool {
    all.get("quantization_method").is_none_or(|method| ["bnb", "bitsandbytes"].contains(&&*word(method)))
}

fn is_constant(all: &Map<String, Yaml>) -> bool {
    ["lr_scheduler", "lr_scheduler_type"].iter().any(|key| all.get(*key).is_some_and(|value| word(value) == "constant"))
}

fn word(value: &Yaml) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Whether a value says nothing.
fn is_empty(value: &Yaml) -> bool {
    matches!(&value.to_string()[..], "null" | "\"\"" | "[]" | "{}")
}
