//! `adapter_config.json`: the minimal set of keys that PEFT writes, and a reader that refuses what cannot be honoured.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::modules::{LayerLists, ModulePatterns};
use crate::files::{self, read_json, to_json};
use crate::native::{Bounds, within};
use crate::recipe::{InitLora, ModuleSet, TrainedBias};
use crate::units::{Fault, FaultKind, abridged, listed};

/// The settings of an adapter: what its file says, and what a recipe says of a new one.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(clippy::struct_excessive_bools, reason = "each is a key of the file")]
pub struct PeftConfig {
    /// Rows of `lora_A`, where no pattern says otherwise.
    pub r: usize,
    /// The numerator of the scale, where no pattern says otherwise.
    pub lora_alpha: f64,
    pub lora_dropout: f64,
    pub target_modules: ModuleSet,
    /// The parameters of modules that have an adapter, as `mlp.experts.down_proj`: matrices of all experts side by side.
    pub target_parameters: Vec<String>,
    /// Modules of which whole copies are trained, as `lm_head`; that of a classification is not named.
    pub modules_to_save: Vec<String>,
    /// Classes are predicted by a matrix that is trained: `task_type = "SEQ_CLS"`.
    pub is_classifier: bool,
    /// Modules that have none though they are among the targets.
    pub exclude_modules: ModuleSet,
    /// The layers whose modules have an adapter; empty: all.
    pub layers_to_transform: Vec<usize>,
    /// Where the numbers of these layers stand in names.
    pub layers_pattern: LayerLists,
    pub rank_pattern: ModulePatterns<usize>,
    pub alpha_pattern: ModulePatterns<f64>,
    /// The denominator of the scale is the root of `r`, not `r` (Kalajdzievski 2023, arXiv 2312.03732).
    pub use_rslora: bool,
    pub lora_bias: bool,
    pub bias: TrainedBias,
    /// The rows of a weight and its addition are scaled to a length that is trained (`DoRA`, Liu et al. 2024, arXiv 2402.09353).
    pub use_dora: bool,
    /// How a new adapter begins. One that began as a part of the weights is written as LoRA beside them as they were.
    pub init: InitLora,
    /// An addition to the embedding is trained for the output projection, too, and stands in the file twice. Once it is read, there are two targets.
    pub ties_output: bool,
    /// The file has copies of embedding or output projection that its settings do not name. No key of the file: the tensors say it.
    pub has_unnamed: bool,
    /// The modules and parameters that are targets as they were written, before they were listed. No key of the file.
    pub given: Box<(ModuleSet, Vec<String>)>,
    /// The model it was trained on, as its author named it.
    pub base_model: Option<String>,
    /// The base model's branch, tag or commit on the Hub.
    pub revision: Option<String>,
    /// The modules are those of a language model inside another model, and are called so. No key of the file: the tensors say it.
    pub is_inner: bool,
}

impl PeftConfig {
    /// LoRA of some modules, and nothing else.
    pub fn plain(r: usize, lora_alpha: f64, lora_dropout: f64, target_modules: ModuleSet) -> Self {
        Self { r, lora_alpha, lora_dropout, target_modules, ..Self::default() }
    }

    /// The revision of a base model, if it is the one that the file names.
    pub fn revision_of(&self, base: &Path) -> Option<String> {
        self.revision.clone().filter(|_| self.base_model.as_deref().map(Path::new) == Some(base))
    }

    /// Where the base model is, as the file names it.
    ///
    /// # Errors
    /// Where the Hugging Face cache has it not at the file's revision.
    pub fn base_dir(&self) -> Result<Option<PathBuf>, Fault> {
        let base = self.base_model.as_deref().map(Path::new);
        base.map(|base| files::model_dir(base, self.revision.as_deref())).transpose()
    }

    /// Rows of a module's `lora_A`, by its whole name.
    pub fn rank_of(&self, module: &str) -> usize {
        self.rank_pattern.get(module).unwrap_or(self.r)
    }

    /// The factor of a module's addition, by its whole name.
    pub fn scale_of(&self, module: &str) -> f64 {
        let (alpha, r) = (self.alpha_pattern.get(module).unwrap_or(self.lora_alpha), self.rank_of(module) as f64);
        alpha / if self.use_rslora { r.sqrt() } else { r }
    }

    /// Whether a whole copy of a module is trained. As in PEFT, a name means all modules whose names end in it, inside a word too.
    pub fn saves(&self, module: &str) -> bool {
        self.modules_to_save.iter().any(|name| module.ends_with(name.as_str()))
    }

    /// The file's bytes, in PEFT's form: sorted keys, indented by 2.
    pub fn to_json(&self) -> Vec<u8> {
        // PEFT adds these of itself; a model has one of them.
        let classifiers: &[&str] = if self.is_classifier { &CLASSIFIERS } else { &[] };
        let saved: Vec<&str> = self.modules_to_save.iter().map(String::as_str).chain(classifiers.iter().copied()).collect();
        let lists = match &self.layers_pattern.names()[..] {
            [] => json!("layers"),
            [name] => json!(name),
            names => json!(names),
        };
        let none_or = |is_none: bool, value: Value| if is_none { Value::Null } else { value };
        let of_layers = |value| none_or(self.layers_to_transform.is_empty(), value);
        let mut values = BTreeMap::from([
            ("alpha_pattern", self.alpha_pattern.to_value(whole_if_it_is)),
            ("auto_mapping", Value::Null),
            ("base_model_name_or_path", json!(self.base_model)),
            ("bias", json!(self.bias.name())),
            ("fan_in_fan_out", json!(false)),
            ("inference_mode", json!(true)),
            ("init_lora_weights", if self.init == InitLora::Gaussian { json!("gaussian") } else { json!(true) }),
            ("layers_pattern", of_layers(lists)),
            ("layers_to_transform", of_layers(json!(self.layers_to_transform))),
            ("lora_alpha", whole_if_it_is(self.lora_alpha)),
            ("lora_dropout", json!(self.lora_dropout)),
            ("modules_to_save", none_or(saved.is_empty(), json!(saved))),
            ("peft_type", json!("LORA")),
            ("r", json!(self.r)),
            ("rank_pattern", self.rank_pattern.to_value(|r| json!(r))),
            ("revision", json!(self.revision)),
            ("target_modules", json!(self.target_modules)),
            ("task_type", json!(if self.is_classifier { SEQ_CLS } else { "CAUSAL_LM" })),
            ("use_dora", json!(self.use_dora)),
            ("use_rslora", json!(self.use_rslora)),
        ]);
        // Servers refuse keys that they do not know, so these stand where they say something.
        let said = [
            (self.exclude_modules != ModuleSet::NONE, "exclude_modules", json!(self.exclude_modules)),
            (!self.target_parameters.is_empty(), "target_parameters", json!(self.target_parameters)),
            (self.lora_bias, "lora_bias", json!(true)),
        ];
        values.extend(said.into_iter().filter(|(is_said, ..)| *is_said).map(|(_, key, value)| (key, value)));
        to_json(&values)
    }

    /// Reads the file; keys that nobody here knows are left alone.
    pub fn read(path: &Path) -> Result<Self, Fault> {
        let table: Map<String, Value> = read_json(path)?;
        let refused = refused(&table);
        if !refused.is_empty() {
            return Err(refused_settings(path, &refused));
        }
        // Patterns are compiled, and take what they like.
        let subject = format!("adapter config `{}`", abridged(path.display())).into();
        let bounds = Bounds { subject, bytes: 192 << 20, time: Duration::from_secs(8) };
        let wrong = |expected: String| {
            let message = format!("`{}`: expected {}", abridged(path.display()), abridged(expected));
            Fault::data(message, "correct that key, or fetch the file again").of_kind(FaultKind::Damaged)
        };
        within(&bounds, || Self::from_table(&table).map_err(wrong))
    }

    fn from_table(table: &Map<String, Value>) -> Result<Self, String> {
        let value = |key: &str| table.get(key).unwrap_or(&Value::Null);
        let found = |key: &str| table.get(key).map_or_else(|| "nothing".into(), Value::to_string);
        let is_said = |key: &str, word| is_word(value(key), word);
        let dropout = table.get("lora_dropout").map_or(Some(0.0), Value::as_f64).filter(|p| (0.0..1.0).contains(p));
        // PEFT adds the classifiers of itself, which the task tells.
        let is_named = |name: &String| !CLASSIFIERS.contains(&name.as_str());
        Ok(Self {
            r: rank(value("r")).ok_or_else(|| format!("`r` from 1 to 65536, found {}", found("r")))?,
            lora_alpha: positive(value("lora_alpha"))
                .ok_or_else(|| format!("a number above 0 as `lora_alpha`, found {}", found("lora_alpha")))?,
            lora_dropout: dropout.ok_or_else(|| format!("`lora_dropout` from 0 to below 1, found {}", found("lora_dropout")))?,
            target_modules: targets(table)?,
            target_parameters: names(table, "target_parameters")?,
            modules_to_save: names(table, "modules_to_save")?.into_iter().filter(is_named).collect(),
            is_classifier: is_said("task_type", SEQ_CLS),
            exclude_modules: modules(table, "exclude_modules", "a list of names or a regular expression")?,
            layers_to_transform: layers(value("layers_to_transform"))?,
            layers_pattern: layer_lists(table)?,
            use_rslora: switch(table, "use_rslora")?,
            lora_bias: switch(table, "lora_bias")?,
            bias: TrainedBias::ALL.iter().copied().find(|bias| is_said("bias", bias.name())).unwrap_or_default(),
            use_dora: switch(table, "use_dora")?,
            init: if is_said("init_lora_weights", "gaussian") { InitLora::Gaussian } else { InitLora::Uniform },
            ties_output: switch(table, "ensure_weight_tying")?,
            base_model: value("base_model_name_or_path").as_str().map(String::from),
            revision: value("revision").as_str().filter(|revision| !revision.is_empty()).map(String::from),
            rank_pattern: patterns(table, "rank_pattern", "ranks from 1 to 65536", rank)?,
            alpha_pattern: patterns(table, "alpha_pattern", "numbers above 0", positive)?,
            ..Self::default()
        })
    }
}

/// Keys of variants that are not built, or not with all of their values: these words are, and values that say nothing. Of ways to begin,
/// many change the weights of the base model, too: without these the adapter means something else.
const SUPPORTED_WORDS: &[(&str, &[&str])] = &[
    ("alora_invocation_tokens", &[]),
    ("arrow_config", &[]),
    ("bias", &["none", "lora_only", "all"]),
    ("fan_in_fan_out", &[]),
    ("init_lora_weights", &["true", "gaussian", "eva", "orthogonal"]),
    ("kasa_config", &[]),
    ("layer_replication", &[]),
    ("loftq_config", &[]),
    ("monteclora_config", &[]),
    ("peft_type", &["LORA"]),
    ("task_type", &["CAUSAL_LM", SEQ_CLS]),
    ("trainable_token_indices", &[]),
    ("use_bdlora", &[]),
    ("use_qalora", &[]),
    ("velora_config", &[]),
];

/// The value of `task_type` with which classes are predicted.
const SEQ_CLS: &str = "SEQ_CLS";
/// The modules that PEFT saves with it.
const CLASSIFIERS: [&str; 2] = ["classifier", "score"];

fn is_word(value: &Value, word: &str) -> bool {
    value.as_str().map_or(*value == true && word == "true", |text| text.eq_ignore_ascii_case(word))
}

/// Settings that would change what the adapter computes and are not built, as `key = value`.
fn refused(table: &Map<String, Value>) -> Vec<String> {
    let said = |(key, words): &(&'static str, &'static [&str])| Some((*key, said(table, key)?, *words));
    let refused =
        SUPPORTED_WORDS.iter().filter_map(said).filter(|(_, value, words)| !words.iter().any(|word| is_word(value, word)));
    refused.map(|(key, value, _)| format!("`{key} = {value}`")).collect()
}

/// The value of a key that says something: no `null`, `false`, or empty list, table or text.
fn said<'a>(table: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    table.get(key).filter(|value| match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(list) => !list.is_empty(),
        Value::Object(table) => !table.is_empty(),
        Value::String(text) => !text.is_empty(),
        _ => true,
    })
}

/// Numbers by regular expression, in the order of the file, which counts where these overlap.
fn patterns<T: Copy + Default>(
    table: &Map<String, Value>,
    key: &str,
    expected: &str,
    read: fn(&Value) -> Option<T>,
) -> Result<ModulePatterns<T>, String> {
    let Some(written) = said(table, key) else { return Ok(ModulePatterns::default()) };
    let pairs =
        written.as_object().ok_or_else(|| format!("`{key}` as a table of numbers by regular expression, found {written}"))?;
    let number = |(pattern, value): (&String, &Value)| match read(value) {
        Some(number) => Ok((pattern.clone(), number)),
        None => Err(format!("{expected} in `{key}`, found {value} at `{pattern}`")),
    };
    let pairs = pairs.iter().map(number).collect::<Result<Vec<_>, String>>()?;
    ModulePatterns::new(pairs).map_err(|what| format!("each key of `{key}` as {what}"))
}

/// A list of names, or nothing.
fn names(table: &Map<String, Value>, key: &str) -> Result<Vec<String>, String> {
    let Some(value) = said(table, key) else { return Ok(Vec::new()) };
    serde_json::from_value(value.clone()).map_err(|_| format!("`{key}` as a list of names, found {value}"))
}

/// True or false; absent it is false.
fn switch(table: &Map<String, Value>, key: &str) -> Result<bool, String> {
    match said(table, key) {
        None => Ok(false),
        Some(Value::Bool(is_on)) => Ok(*is_on),
        Some(value) => Err(format!("`{key}` as true or false, found {value}")),
    }
}

/// One layer, several, or all.
fn layers(value: &Value) -> Result<Vec<usize>, String> {
    let index = |value: &Value| value.as_u64().map(|index| index as usize);
    let found = match value {
        Value::Null => Some(Vec::new()),
        Value::Array(list) => list.iter().map(index).collect(),
        one => index(one).map(|one| vec![one]),
    };
    found.ok_or_else(|| format!("`layers_to_transform` as an index or a list of such, found {value}"))
}

/// One name, several, or the usual one.
fn layer_lists(table: &Map<String, Value>) -> Result<LayerLists, String> {
    let names = match said(table, "layers_pattern") {
        Some(Value::String(name)) => vec![name.clone()],
        _ => names(table, "layers_pattern")?,
    };
    LayerLists::new(names).map_err(|what| format!("each name of `layers_pattern` as {what}"))
}

fn rank(value: &Value) -> Option<usize> {
    value.as_u64().filter(|r| (1..=65_536).contains(r)).map(|r| r as usize)
}

fn positive(value: &Value) -> Option<f64> {
    value.as_f64().filter(|number| number.is_finite() && *number > 0.0)
}

/// An integer where it is one: some servers declare `lora_alpha` as such.
fn whole_if_it_is(number: f64) -> Value {
    if number.fract() == 0.0 { json!(number as i64) } else { json!(number) }
}

/// The modules that have an adapter; there may be none where parameters have one.
fn targets(table: &Map<String, Value>) -> Result<ModuleSet, String> {
    const KEY: &str = "target_modules";
    const FORMS: &str = "a list of names, a regular expression or \"all-linear\"";
    let found = match said(table, KEY) {
        Some(value) if value == "all-linear" => ModuleSet::AllLinear,
        _ => modules(table, KEY, FORMS)?,
    };
    if found == ModuleSet::NONE && said(table, "target_parameters").is_none() {
        return Err(format!("`{KEY}` as {FORMS}, found {}", table.get(KEY).unwrap_or(&Value::Null)));
    }
    Ok(found)
}

/// What stands at a key that names modules, or none. `Err` says what was expected.
fn modules(table: &Map<String, Value>, key: &str, forms: &str) -> Result<ModuleSet, String> {
    match said(table, key) {
        None => Ok(ModuleSet::NONE),
        // As in PEFT, which takes a single name for an expression, too.
        Some(Value::String(text)) => ModuleSet::matching(text).map_err(|what| format!("`{key}` as {what}")),
        Some(value) => match serde_json::from_value(value.clone()) {
            Ok(names) => Ok(ModuleSet::Names(names)),
            Err(_) => Err(format!("`{key}` as {forms}, found {value}")),
        },
    }
}

/// Settings of an adapter that can't be followed, each as `key = value`.
pub(in crate::model) fn refused_settings(path: &Path, settings: &[String]) -> Fault {
    let message = format!("`{}` asks for what is not supported: {}", abridged(path.display()), listed(settings));
    let hint = "supported are LoRA and DoRA, with rsLoRA, patterns, chosen layers, `lora_bias` and `bias = \"lora_only\"`";
    Fault::data(message, hint)
}
