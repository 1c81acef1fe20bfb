//! `adapter_config.json`: the minimal set of keys that PEFT writes, and a reader that refuses what cannot be honoured.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value, json};

use super::peft_modules::{ExcludedModules, InFileOrder, ModulePatterns};
use super::{FilesError, read_json, to_json};

/// A LoRA adapter's settings.
#[derive(Clone, Debug, PartialEq)]
pub struct PeftConfig {
    /// Rows of `lora_A`, where no pattern says otherwise.
    pub r: usize,
    /// The numerator of the scale, where no pattern says otherwise.
    pub lora_alpha: f64,
    /// Dropout before `lora_A`.
    pub lora_dropout: f64,
    /// The modules that have an adapter.
    pub target_modules: PeftTargets,
    /// The parameters of modules that have an adapter, as `mlp.experts.down_proj`: matrices of all experts side by side.
    pub target_parameters: Vec<String>,
    /// Those of them that have none.
    pub exclude_modules: Option<ExcludedModules>,
    /// `r` of the modules that match.
    pub rank_pattern: ModulePatterns<usize>,
    /// `lora_alpha` of the modules that match.
    pub alpha_pattern: ModulePatterns<f64>,
    /// The denominator of the scale is the root of `r`, not `r` (Kalajdzievski 2023, arXiv 2312.03732).
    pub use_rslora: bool,
    /// The model it was trained on, as its author named it.
    pub base_model: Option<String>,
}

/// Which modules have an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeftTargets {
    /// Every linear layer of the decoder.
    AllLinear,
    /// Modules by the last part of their name.
    Names(Vec<String>),
}

/// Keys of variants that are not built, which only mean nothing with one of these values.
const ONLY_INERT: &[(&str, &[Inert])] = &[
    ("alora_invocation_tokens", &[Inert::Nothing]),
    ("arrow_config", &[Inert::Nothing]),
    ("bias", &[Inert::Text("none")]),
    ("fan_in_fan_out", &[Inert::Nothing]),
    ("kasa_config", &[Inert::Nothing]),
    ("layer_replication", &[Inert::Nothing]),
    ("layers_pattern", &[Inert::Nothing]),
    ("layers_to_transform", &[Inert::Nothing]),
    ("lora_bias", &[Inert::Nothing]),
    ("modules_to_save", &[Inert::Nothing]),
    ("monteclora_config", &[Inert::Nothing]),
    ("peft_type", &[Inert::Text("LORA")]),
    ("task_type", &[Inert::Nothing, Inert::Text("CAUSAL_LM")]),
    ("trainable_token_indices", &[Inert::Nothing]),
    ("use_bdlora", &[Inert::Nothing]),
    ("use_dora", &[Inert::Nothing]),
    ("use_qalora", &[Inert::Nothing]),
    ("velora_config", &[Inert::Nothing]),
];

/// Starting points that also change the base model's weights: without these the adapter means something else.
const CHANGES_BASE: &[&str] = &["pissa", "olora", "loftq", "corda", "lora_ga"];

/// Keys that have no effect on a loaded adapter, or are read below.
const HARMLESS: &[&str] = &[
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "target_modules",
    "target_parameters",
    "use_rslora",
];

/// A value with which a key asks for nothing.
#[derive(Clone, Copy)]
enum Inert {
    /// `null`, `false`, or an empty list, table or text.
    Nothing,
    Text(&'static str),
}

impl Inert {
    fn is(self, value: &Value) -> bool {
        match (self, value) {
            (Self::Nothing, Value::Null | Value::Bool(false)) => true,
            (Self::Nothing, Value::Array(list)) => list.is_empty(),
            (Self::Nothing, Value::Object(table)) => table.is_empty(),
            (Self::Nothing, Value::String(text)) => text.is_empty(),
            (Self::Text(expected), Value::String(text)) => text.eq_ignore_ascii_case(expected),
            _ => false,
        }
    }
}

/// What stands at a key that is written.
enum JsonEntry {
    Value(Value),
    /// In this order, which counts.
    Table(Vec<(String, Value)>),
}

impl Serialize for JsonEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Value(value) => value.serialize(serializer),
            Self::Table(pairs) => serializer.collect_map(pairs.iter().map(|(key, value)| (key, value))),
        }
    }
}

impl PeftConfig {
    /// Plain LoRA.
    pub fn plain(r: usize, lora_alpha: f64, lora_dropout: f64, target_modules: PeftTargets) -> Self {
        Self {
            r,
            lora_alpha,
            lora_dropout,
            target_modules,
            target_parameters: Vec::new(),
            exclude_modules: None,
            rank_pattern: ModulePatterns::default(),
            alpha_pattern: ModulePatterns::default(),
            use_rslora: false,
            base_model: None,
        }
    }

    /// Whether nothing is a target.
    pub fn names_nothing(&self) -> bool {
        self.target_parameters.is_empty() && matches!(&self.target_modules, PeftTargets::Names(names) if names.is_empty())
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

    /// The file's bytes, in PEFT's form: sorted keys, indented by 2.
    pub fn to_json(&self) -> Vec<u8> {
        let targets = match &self.target_modules {
            PeftTargets::AllLinear => json!("all-linear"),
            PeftTargets::Names(names) => json!(names),
        };
        let values = [
            ("auto_mapping", Value::Null),
            ("base_model_name_or_path", json!(self.base_model)),
            ("bias", json!("none")),
            ("fan_in_fan_out", json!(false)),
            ("inference_mode", json!(true)),
            ("init_lora_weights", json!(true)),
            ("layers_pattern", Value::Null),
            ("layers_to_transform", Value::Null),
            ("lora_alpha", whole_if_it_is(self.lora_alpha)),
            ("lora_dropout", json!(self.lora_dropout)),
            ("modules_to_save", Value::Null),
            ("peft_type", json!("LORA")),
            ("r", json!(self.r)),
            ("revision", Value::Null),
            ("target_modules", targets),
            ("task_type", json!("CAUSAL_LM")),
            ("use_dora", json!(false)),
            ("use_rslora", json!(self.use_rslora)),
        ];
        let excluded = self.exclude_modules.as_ref().map(|excluded| ("exclude_modules", excluded.to_value()));
        let parameters = (!self.target_parameters.is_empty()).then(|| ("target_parameters", json!(self.target_parameters)));
        let values = values.into_iter().chain(excluded).chain(parameters).map(|(key, value)| (key, JsonEntry::Value(value)));
        let ranks = self.rank_pattern.iter().map(|(pattern, r)| (pattern.into(), json!(r))).collect();
        let alphas = self.alpha_pattern.iter().map(|(pattern, alpha)| (pattern.into(), whole_if_it_is(alpha))).collect();
        let patterns = [("rank_pattern", JsonEntry::Table(ranks)), ("alpha_pattern", JsonEntry::Table(alphas))];
        to_json(&values.chain(patterns).collect::<BTreeMap<_, _>>())
    }

    /// Reads the file; also returns the keys that nobody here knows, which are ignored.
    pub fn read(path: &Path) -> Result<(Self, Vec<String>), FilesError> {
        let table: Map<String, Value> = read_json(path)?;
        let refused = refused(&table);
        if !refused.is_empty() {
            return Err(FilesError::AdapterSettings { path: path.to_path_buf(), settings: refused });
        }
        let known = |key: &str| HARMLESS.contains(&key) || ONLY_INERT.iter().any(|(inert, _)| *inert == key);
        let unknown = table.keys().filter(|key| !known(key)).cloned().collect();
        let wrong = |reason| FilesError::Json { path: path.to_path_buf(), reason: format!("expected {reason}") };
        let mut config = Self::from_table(&table).map_err(wrong)?;
        if has_patterns(&table).map_err(wrong)? {
            config.take_patterns(read_json(path)?).map_err(wrong)?;
        }
        Ok((config, unknown))
    }

    /// All but the patterns, whose order the table has lost.
    fn from_table(table: &Map<String, Value>) -> Result<Self, String> {
        let found = |key: &str| table.get(key).map_or_else(|| "nothing".into(), Value::to_string);
        let r = table.get("r").and_then(rank);
        let lora_alpha = table.get("lora_alpha").and_then(finite);
        let dropout = table.get("lora_dropout").map_or(Some(0.0), Value::as_f64).filter(|p| (0.0..1.0).contains(p));
        let targets = PeftTargets::read(table);
        let plain = Self::plain(
            r.ok_or_else(|| format!("`r` from 1 to 65536, found {}", found("r")))?,
            lora_alpha.ok_or_else(|| format!("a number `lora_alpha`, found {}", found("lora_alpha")))?,
            dropout.ok_or_else(|| format!("`lora_dropout` from 0 to below 1, found {}", found("lora_dropout")))?,
            targets.ok_or_else(|| {
                format!("`target_modules` as a list of names or \"all-linear\", found {}", found("target_modules"))
            })?,
        );
        Ok(Self {
            target_parameters: names(table, "target_parameters")?,
            exclude_modules: ExcludedModules::read(table.get("exclude_modules"))?,
            use_rslora: match table.get("use_rslora") {
                None => false,
                Some(Value::Bool(uses)) => *uses,
                Some(value) if Inert::Nothing.is(value) => false,
                Some(value) => return Err(format!("`use_rslora` as true or false, found {value}")),
            },
            base_model: table.get("base_model_name_or_path").and_then(Value::as_str).map(String::from),
            ..plain
        })
    }

    fn take_patterns(&mut self, tables: PatternTables) -> Result<(), String> {
        self.rank_pattern = patterns("rank_pattern", tables.rank_pattern, "ranks from 1 to 65536", rank)?;
        self.alpha_pattern = patterns("alpha_pattern", tables.alpha_pattern, "numbers", finite)?;
        Ok(())
    }
}

/// Whether any module has a rank or an alpha of its own.
fn has_patterns(table: &Map<String, Value>) -> Result<bool, String> {
    let mut has_any = false;
    for key in ["rank_pattern", "alpha_pattern"] {
        match table.get(key) {
            Some(value) if !Inert::Nothing.is(value) => {
                let expected = || format!("`{key}` as a table of numbers by regular expression, found {value}");
                has_any |= value.is_object().then_some(true).ok_or_else(expected)?;
            }
            _ => {}
        }
    }
    Ok(has_any)
}

/// The patterns of a file, in its order.
#[derive(Deserialize)]
struct PatternTables {
    rank_pattern: Option<InFileOrder>,
    alpha_pattern: Option<InFileOrder>,
}

fn patterns<T: Copy>(
    key: &str,
    table: Option<InFileOrder>,
    expected: &str,
    read: fn(&Value) -> Option<T>,
) -> Result<ModulePatterns<T>, String> {
    let value = |(pattern, value): (String, Value)| match read(&value) {
        Some(number) => Ok((pattern, number)),
        None => Err(format!("{expected} in `{key}`, found {value} at `{pattern}`")),
    };
    let pairs = table.unwrap_or_default().0.into_iter().map(value).collect::<Result<Vec<_>, String>>()?;
    ModulePatterns::new(pairs).map_err(|what| format!("each key of `{key}` as {what}"))
}

/// A list of names, or nothing.
fn names(table: &Map<String, Value>, key: &str) -> Result<Vec<String>, String> {
    match table.get(key) {
        None => Ok(Vec::new()),
        Some(value) if Inert::Nothing.is(value) => Ok(Vec::new()),
        Some(value) => serde_json::from_value(value.clone()).map_err(|_| format!("`{key}` as a list of names, found {value}")),
    }
}

fn rank(value: &Value) -> Option<usize> {
    value.as_u64().filter(|r| (1..=65_536).contains(r)).map(|r| r as usize)
}

fn finite(value: &Value) -> Option<f64> {
    value.as_f64().filter(|number| number.is_finite())
}

/// An integer where it is one: some servers declare `lora_alpha` as such.
fn whole_if_it_is(number: f64) -> Value {
    if number.fract() == 0.0 { json!(number as i64) } else { json!(number) }
}

impl PeftTargets {
    fn read(table: &Map<String, Value>) -> Option<Self> {
        let has_parameters = table.get("target_parameters").is_some_and(|value| !Inert::Nothing.is(value));
        match table.get("target_modules")? {
            Value::String(text) if text == "all-linear" => Some(Self::AllLinear),
            // A text is a regular expression over whole module names: a single name would match nothing.
            Value::Array(list) if !list.is_empty() || has_parameters => {
                let names: Option<Vec<String>> = list.iter().map(|name| name.as_str().map(String::from)).collect();
                names.map(Self::Names)
            }
            _ => None,
        }
    }
}

/// Settings that would change what the adapter computes and are not built, as `key = value`.
fn refused(table: &Map<String, Value>) -> Vec<String> {
    let active = |(key, inert): &(&str, &[Inert])| {
        let value = table.get(*key)?;
        (!inert.iter().any(|inert| inert.is(value))).then(|| format!("`{key} = {value}`"))
    };
    let mut refused: Vec<String> = ONLY_INERT.iter().filter_map(active).collect();
    if let Some(Value::String(start)) = table.get("init_lora_weights")
        && CHANGES_BASE.iter().any(|name| start.to_lowercase().starts_with(name))
    {
        refused.push(format!("`init_lora_weights = \"{start}\"`"));
    }
    refused
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> PeftConfig {
        let names = ["q_proj", "v_proj"].map(String::from).to_vec();
        PeftConfig { base_model: Some("model".into()), ..PeftConfig::plain(4, 8.0, 0.0, PeftTargets::Names(names)) }
    }

    fn read(text: &[u8]) -> Result<(PeftConfig, Vec<String>), FilesError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("adapter_config.json");
        std::fs::write(&path, text).unwrap();
        PeftConfig::read(&path)
    }

    fn with(key: &str, value: Value) -> Vec<u8> {
        let mut table: Map<String, Value> = serde_json::from_slice(&config().to_json()).unwrap();
        table.insert(key.into(), value);
        to_json(&table)
    }

    #[test]
    fn what_is_written_has_sorted_keys_and_is_read_back() {
        let text = String::from_utf8(config().to_json()).unwrap();
        let keys: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("  \"")?.split('"').next()).collect();
        assert!(keys.is_sorted() && keys.len() == 20, "{text}");
        assert!(text.contains("\"lora_alpha\": 8,") && text.contains("\"lora_dropout\": 0.0"), "{text}");
        assert_eq!(read(text.as_bytes()).unwrap(), (config(), vec![]));
        let other = PeftConfig { lora_alpha: 0.5, target_modules: PeftTargets::AllLinear, base_model: None, ..config() };
        assert_eq!(read(&other.to_json()).unwrap().0, other);
    }

    /// What is written for plain LoRA stays the same to the byte: checkpoints of older runs are compared with it.
    #[test]
    fn plain_lora_is_written_as_ever() {
        let expected = r#"{
  "alpha_pattern": {},
  "auto_mapping": null,
  "base_model_name_or_path": "model",
  "bias": "none",
  "fan_in_fan_out": false,
  "inference_mode": true,
  "init_lora_weights": true,
  "layers_pattern": null,
  "layers_to_transform": null,
  "lora_alpha": 8,
  "lora_dropout": 0.0,
  "modules_to_save": null,
  "peft_type": "LORA",
  "r": 4,
  "rank_pattern": {},
  "revision": null,
  "target_modules": [
    "q_proj",
    "v_proj"
  ],
  "task_type": "CAUSAL_LM",
  "use_dora": false,
  "use_rslora": false
}
"#;
        assert_eq!(String::from_utf8(config().to_json()).unwrap(), expected);
    }

    #[test]
    fn ranks_scales_and_exclusions_by_module_are_read_back_in_their_order() {
        let text = r#"{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": true, "exclude_modules": ".*o_proj",
            "rank_pattern": {"q_proj": 16, "self_attn.*": 9, "[a-z]_proj": 2}, "alpha_pattern": {"layers.1.*": 0.5, "k_proj": 6}}"#;
        let (read_config, unknown) = read(text.as_bytes()).unwrap();
        assert!(unknown.is_empty());
        let scale = |module: &str| (read_config.rank_of(module), (read_config.scale_of(module) * 1e6).round());
        assert_eq!(scale("model.layers.0.self_attn.q_proj"), (16, 2e6));
        assert_eq!(scale("model.layers.0.self_attn.k_proj"), (9, 2e6));
        assert_eq!(scale("model.layers.1.self_attn.k_proj"), (9, 166_667.0));
        assert_eq!(scale("model.layers.0.mlp.up_proj"), (4, 4e6));
        assert!(read_config.exclude_modules.as_ref().unwrap().contains("model.layers.0.self_attn.o_proj"));
        let written = read_config.to_json();
        assert_eq!(read(&written).unwrap().0, read_config);
        let written = String::from_utf8(written).unwrap();
        let places = ["q_proj\": 16", "self_attn.*\": 9", "[a-z]_proj\": 2"].map(|pair| written.find(pair).unwrap());
        assert!(
            places.is_sorted() && written.contains("\"k_proj\": 6\n") && written.contains("\"layers.1.*\": 0.5"),
            "{written}"
        );
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        let cases = [
            ("use_dora", json!(true)),
            ("lora_bias", json!(true)),
            ("bias", json!("lora_only")),
            ("modules_to_save", json!(["lm_head"])),
            ("layers_to_transform", json!([1])),
            ("init_lora_weights", json!("pissa_niter_16")),
            ("peft_type", json!("IA3")),
            ("task_type", json!("SEQ_CLS")),
        ];
        for (key, value) in cases {
            let error = read(&with(key, value)).unwrap_err();
            assert!(matches!(&error, FilesError::AdapterSettings { settings, .. } if settings.len() == 1), "{error}");
            assert!(error.to_string().contains(key), "{error}");
        }
    }

    #[test]
    fn unknown_keys_are_named_and_harmless_ones_are_not() {
        assert_eq!(read(&with("brand_new", json!(3))).unwrap().1, ["brand_new"]);
        assert_eq!(read(&with("modules_to_save", json!([]))).unwrap().1, [""; 0]);
        assert_eq!(read(&with("init_lora_weights", json!("gaussian"))).unwrap().0, config());
    }

    #[test]
    fn wrong_values_say_what_was_expected_and_found() {
        for (key, value) in [
            ("r", json!(0)),
            ("r", json!("8")),
            ("lora_alpha", Value::Null),
            ("lora_dropout", json!(1.5)),
            ("target_modules", json!(".*q_proj")),
            ("target_modules", json!([])),
            ("use_rslora", json!("yes")),
            ("rank_pattern", json!({"q_proj": 0})),
            ("rank_pattern", json!({"q_proj": 2.5})),
            ("rank_pattern", json!([1])),
            ("rank_pattern", json!({"q_proj(": 2})),
            ("alpha_pattern", json!({"q_proj": "8"})),
            ("exclude_modules", json!([1])),
            ("exclude_modules", json!("[")),
            ("exclude_modules", json!({"q_proj": 1})),
        ] {
            let error = read(&with(key, value)).unwrap_err().to_string();
            assert!(error.contains("expected") && error.contains("found") && error.contains(key), "{error}");
        }
    }
}
