//! From the recipe back to TOML and to words, and what differs between two recipes.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use toml::Value;

use super::auto::AUTO;
use super::grad::{GradRecipe, OpenKey};
use super::plan::{HeadRecipe, Labels, LoraRecipe, Recipe, TargetModules, ValidationSource, Warmup};

/// A key with another value in another recipe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Dotted, as `kv_cache.chunk_size`.
    pub key: String,
    /// The value of the one recipe, in TOML; `not set` where it has none.
    pub before: String,
    /// The value of the other.
    pub after: String,
}

type Section = (&'static str, Vec<(&'static str, Value)>);

impl Recipe {
    /// The complete recipe. Loading it again gives an equal one.
    pub fn to_toml(&self) -> String {
        let top = self.output_dir.iter().map(|path| format!("output_dir = {}\n", path_value(path)));
        let tables = self.sections().into_iter().map(|(name, entries)| {
            let lines: Vec<String> = entries.into_iter().map(|(key, value)| format!("{key} = {value}\n")).collect();
            format!("[{name}]\n{}", lines.concat())
        });
        top.chain(tables).collect::<Vec<_>>().join("\n")
    }

    /// What stands in the way of continuing this recipe's run with `resumed`: everything that differs, but for the lengths
    /// of the run, logging, saving, the tiling of the gradient, and where it is written.
    pub fn changes_refused_on_resume(&self, resumed: &Self) -> Vec<Difference> {
        self.differences(resumed).into_iter().filter(|difference| !may_change(&difference.key)).collect()
    }

    /// What differs between this recipe and another one, by key.
    pub fn differences(&self, other: &Self) -> Vec<Difference> {
        let (before, after) = (self.flat(), other.flat());
        let mut keys: Vec<&String> = before.keys().chain(after.keys()).collect();
        keys.sort();
        keys.dedup();
        let show = |value: Option<&String>| value.cloned().unwrap_or_else(|| "not set".to_owned());
        keys.into_iter()
            .filter(|key| before.get(*key) != after.get(*key))
            .map(|key| Difference { key: key.clone(), before: show(before.get(key)), after: show(after.get(key)) })
            .collect()
    }

    /// All values in TOML by their dotted keys.
    fn flat(&self) -> BTreeMap<String, String> {
        let sections = self.sections().into_iter();
        sections
            .flat_map(|(name, entries)| entries.into_iter().map(move |(key, value)| (format!("{name}.{key}"), value.to_string())))
            .collect()
    }

    fn sections(&self) -> Vec<Section> {
        let (model, eval, checkpoint) = (&self.model, &self.eval, &self.checkpoint);
        let model = [
            Some(("path", path_value(&model.path))),
            model.adapter.as_deref().map(|path| ("adapter", path_value(path))),
            Some(("dtype", word(model.dtype.name()))),
            Some(("allow_tf32", Value::Boolean(model.allow_tf32))),
        ];
        let eval = [
            Some(("interval", whole(eval.interval))),
            Some(("initial", Value::Boolean(eval.initial))),
            Some(("metric", word(eval.metric.name()))),
            Some(("mode", word(eval.mode.name()))),
            eval.micro_batch_size.map(|size| ("micro_batch_size", whole(size as u64))),
            eval.max_batches.map(|batches| ("max_batches", whole(batches as u64))),
        ];
        let checkpoint = [
            Some(("save_interval", whole(checkpoint.save_interval))),
            checkpoint.intermediate_save_interval.map(|steps| ("intermediate_save_interval", whole(steps))),
            Some(("intermediate_save_keep", whole(checkpoint.intermediate_save_keep as u64))),
        ];
        let lora = self.lora.as_ref().map(|lora| ("lora", lora_entries(lora)));
        let rest = [
            ("data", self.data_entries()),
            ("head", self.head_entries()),
            ("kv_cache", self.cache_entries()),
            ("grad", self.grad.entries()),
            ("train", self.train_entries()),
            ("optimizer", self.optimizer_entries()),
            ("eval", eval.into_iter().flatten().collect()),
            ("checkpoint", checkpoint.into_iter().flatten().collect()),
            ("log", vec![("interval", whole(self.log.interval))]),
        ];
        std::iter::once(("model", model.into_iter().flatten().collect())).chain(lora).chain(rest).collect()
    }

    fn data_entries(&self) -> Vec<(&'static str, Value)> {
        let data = &self.data;
        let validation = match &data.validation {
            ValidationSource::File(path) => ("validation", path_value(path)),
            ValidationSource::Fraction(part) => ("validation_fraction", Value::Float(*part)),
        };
        let entries = [
            Some(("format", word(data.format.name()))),
            Some(("train", path_value(&data.train))),
            Some(validation),
            data.max_seq_length.map(|length| ("max_seq_length", whole(length as u64))),
            Some(("on_too_long", word(data.on_too_long.name()))),
            Some(("order", word(data.order.name()))),
            Some(("train_on_prompt", Value::Boolean(data.train_on_prompt))),
        ];
        entries.into_iter().flatten().collect()
    }

    fn head_entries(&self) -> Vec<(&'static str, Value)> {
        let HeadRecipe::SeqClassificationOnLogits(labels) = &self.head else { return vec![("kind", word("next_token"))] };
        let labels = match labels {
            Labels::Tokens(tokens) => ("label_tokens", Value::from(tokens.clone())),
            Labels::Texts(texts) => ("labels", Value::from(texts.clone())),
        };
        vec![("kind", word("seq_classification_on_logits")), labels]
    }

    fn cache_entries(&self) -> Vec<(&'static str, Value)> {
        let cache = &self.kv_cache;
        vec![
            ("policy", cache.policy.to_value()),
            ("buffer", word(cache.buffer.name())),
            ("cache_length", cache.cache_length.to_value()),
            ("chunk_size", whole(cache.chunk_size as u64)),
            ("chunking", word(cache.chunking.name())),
            ("randomize_chunk_sizes", Value::Boolean(cache.randomize_chunk_sizes)),
            ("storage", word(cache.storage.name())),
            ("cpu_offload", Value::Boolean(cache.cpu_offload)),
        ]
    }

    fn train_entries(&self) -> Vec<(&'static str, Value)> {
        let train = &self.train;
        let entries = [
            Some(("micro_batch_size", whole(train.micro_batch_size as u64))),
            Some(("gradient_accumulation_steps", whole(train.gradient_accumulation_steps as u64))),
            train.max_steps.map(|steps| ("max_steps", whole(steps))),
            Some(("epochs", whole(train.epochs))),
            Some(("max_grad_norm", Value::Float(train.max_grad_norm))),
            Some(("seed", whole(train.seed))),
            Some(("deterministic", Value::Boolean(train.deterministic))),
            Some(("weights", word(self.weights().name()))),
        ];
        entries.into_iter().flatten().collect()
    }

    fn optimizer_entries(&self) -> Vec<(&'static str, Value)> {
        let optimizer = &self.optimizer;
        let warmup = match optimizer.warmup {
            Warmup::Steps(steps) => ("warmup_steps", whole(steps)),
            Warmup::Ratio(part) => ("warmup_ratio", Value::Float(part)),
        };
        vec![
            ("learning_rate", Value::Float(optimizer.learning_rate)),
            ("weight_decay", Value::Float(optimizer.weight_decay)),
            ("betas", Value::from(vec![optimizer.betas.0, optimizer.betas.1])),
            ("eps", Value::Float(optimizer.eps)),
            ("schedule", word(optimizer.schedule.name())),
            warmup,
        ]
    }
}

impl GradRecipe {
    /// The keys that may be left open, as a recipe would have them in one line: `grad = { layers_per_cell = 4, … }`.
    pub fn tiling(&self) -> String {
        let is_of_tiling = |name: &str| OpenKey::ALL.iter().any(|key| key.name() == name);
        let entries = self.entries().into_iter().filter(|(name, _)| is_of_tiling(name));
        let written: Vec<String> = entries.map(|(name, value)| format!("{name} = {value}")).collect();
        format!("grad = {{ {} }}", written.join(", "))
    }

    fn entries(&self) -> Vec<(&'static str, Value)> {
        let either = |key: OpenKey, value: Option<Value>| {
            let value = if self.is_open(key) { Some(word(AUTO)) } else { value };
            value.map(|value| (key.name(), value))
        };
        let entries = [
            either(OpenKey::LayersPerCell, Some(whole(self.layers_per_cell as u64))),
            Some(("chunks_per_cell_multiplier", Value::Float(self.chunks_per_cell_multiplier))),
            either(OpenKey::ChunksPerCell, self.chunks_per_cell.map(|chunks| whole(chunks as u64))),
            either(OpenKey::LayerCheckpoints, Some(word(self.layer_checkpoints.form.name()))),
            either(OpenKey::LayerCheckpointsPlace, Some(word(self.layer_checkpoints.place.name()))),
            either(OpenKey::UndoLog, Some(word(self.undo_log.form.name()))),
            either(OpenKey::UndoLogPlace, Some(word(self.undo_log.place.name()))),
            self.scratch_dir.as_deref().map(|path| ("scratch_dir", path_value(path))),
            Some(("single_tokens_for_targets", Value::Boolean(self.single_tokens_for_targets))),
            Some(("on_out_of_memory", word(self.on_out_of_memory.name()))),
            Some(("cuda_graphs", Value::Boolean(self.cuda_graphs))),
        ];
        entries.into_iter().flatten().collect()
    }
}

/// `all-linear`, or `q_proj, v_proj`.
impl fmt::Display for TargetModules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllLinear => f.write_str("all-linear"),
            Self::Names(names) => f.write_str(&names.join(", ")),
        }
    }
}

/// `A, B, C, D`, or `tokens 32, 33`.
impl fmt::Display for Labels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tokens(tokens) => {
                let numbers: Vec<String> = tokens.iter().map(ToString::to_string).collect();
                write!(f, "tokens {}", numbers.join(", "))
            }
            Self::Texts(texts) => f.write_str(&texts.join(", ")),
        }
    }
}

fn lora_entries(lora: &LoraRecipe) -> Vec<(&'static str, Value)> {
    let targets = match &lora.target_modules {
        TargetModules::AllLinear => word("all-linear"),
        TargetModules::Names(names) => Value::from(names.clone()),
    };
    vec![
        ("r", whole(lora.r as u64)),
        ("alpha", Value::Float(lora.alpha)),
        ("dropout", Value::Float(lora.dropout)),
        ("target_modules", targets),
    ]
}

fn may_change(key: &str) -> bool {
    let (table, _) = key.split_once('.').unwrap_or((key, ""));
    // The one key of `grad` that says what is computed, not how.
    key != "grad.single_tokens_for_targets"
        && (matches!(table, "log" | "checkpoint" | "grad")
            || matches!(key, "train.epochs" | "train.max_steps" | "kv_cache.cpu_offload"))
}

fn word(text: &str) -> Value {
    Value::String(text.to_owned())
}

/// TOML's integers end at 2^63 - 1; a recipe that was loaded has none beyond.
fn whole(number: u64) -> Value {
    Value::Integer(number as i64)
}

/// The resolver has seen to it that the path is UTF-8.
fn path_value(path: &Path) -> Value {
    word(&path.to_string_lossy())
}
