//! `adapter_config.json`: the minimal set of keys that PEFT writes, and a reader that refuses what cannot be honoured.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::{FilesError, read_json, to_json};

/// A plain LoRA adapter's settings.
#[derive(Clone, Debug, PartialEq)]
pub struct PeftConfig {
    /// Rows of `lora_A`.
    pub r: usize,
    /// The scale is `lora_alpha / r`.
    pub lora_alpha: f64,
    /// Dropout before `lora_A`.
    pub lora_dropout: f64,
    /// The modules that have an adapter.
    pub target_modules: PeftTargets,
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
    ("alpha_pattern", &[Inert::Nothing]),
    ("arrow_config", &[Inert::Nothing]),
    ("bias", &[Inert::Text("none")]),
    ("exclude_modules", &[Inert::Nothing]),
    ("fan_in_fan_out", &[Inert::Nothing]),
    ("kasa_config", &[Inert::Nothing]),
    ("layer_replication", &[Inert::Nothing]),
    ("layers_pattern", &[Inert::Nothing]),
    ("layers_to_transform", &[Inert::Nothing]),
    ("lora_bias", &[Inert::Nothing]),
    ("modules_to_save", &[Inert::Nothing]),
    ("monteclora_config", &[Inert::Nothing]),
    ("peft_type", &[Inert::Text("LORA")]),
    ("rank_pattern", &[Inert::Nothing]),
    ("target_parameters", &[Inert::Nothing]),
    ("task_type", &[Inert::Nothing, Inert::Text("CAUSAL_LM")]),
    ("trainable_token_indices", &[Inert::Nothing]),
    ("use_bdlora", &[Inert::Nothing]),
    ("use_dora", &[Inert::Nothing]),
    ("use_qalora", &[Inert::Nothing]),
    ("use_rslora", &[Inert::Nothing]),
    ("velora_config", &[Inert::Nothing]),
];

/// Starting points that also change the base model's weights: without these the adapter means something else.
const CHANGES_BASE: &[&str] = &["pissa", "olora", "loftq", "corda", "lora_ga"];

/// Keys that have no effect on a loaded adapter, or are read below.
const HARMLESS: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
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
    "revision",
    "target_modules",
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

impl PeftConfig {
    /// The file's bytes, in PEFT's form: sorted keys, indented by 2.
    pub fn to_json(&self) -> Vec<u8> {
        // An integer where it is one: some servers declare `lora_alpha` as such.
        let alpha = if self.lora_alpha.fract() == 0.0 { json!(self.lora_alpha as i64) } else { json!(self.lora_alpha) };
        let targets = match &self.target_modules {
            PeftTargets::AllLinear => json!("all-linear"),
            PeftTargets::Names(names) => json!(names),
        };
        let mut keys: Vec<(&str, Value)> = vec![
            ("alpha_pattern", json!({})),
            ("auto_mapping", Value::Null),
            ("base_model_name_or_path", json!(self.base_model)),
            ("bias", json!("none")),
            ("fan_in_fan_out", json!(false)),
            ("inference_mode", json!(true)),
            ("init_lora_weights", json!(true)),
            ("layers_pattern", Value::Null),
            ("layers_to_transform", Value::Null),
            ("lora_alpha", alpha),
            ("lora_dropout", json!(self.lora_dropout)),
            ("modules_to_save", Value::Null),
            ("peft_type", json!("LORA")),
            ("r", json!(self.r)),
            ("rank_pattern", json!({})),
            ("revision", Value::Null),
            ("target_modules", targets),
            ("task_type", json!("CAUSAL_LM")),
            ("use_dora", json!(false)),
            ("use_rslora", json!(false)),
        ];
        keys.sort_by_key(|(key, _)| *key);
        to_json(&keys.into_iter().map(|(key, value)| (key.to_string(), value)).collect::<Map<_, _>>())
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
        let config = Self::from_table(&table)
            .map_err(|reason| FilesError::Json { path: path.to_path_buf(), reason: format!("expected {reason}") })?;
        Ok((config, unknown))
    }

    fn from_table(table: &Map<String, Value>) -> Result<Self, String> {
        let found = |key: &str| table.get(key).map_or_else(|| "nothing".into(), Value::to_string);
        let r = table.get("r").and_then(Value::as_u64).filter(|r| (1..=65_536).contains(r));
        let lora_alpha = table.get("lora_alpha").and_then(Value::as_f64).filter(|alpha| alpha.is_finite());
        let dropout = table.get("lora_dropout").map_or(Some(0.0), Value::as_f64).filter(|p| (0.0..1.0).contains(p));
        Ok(Self {
            r: r.ok_or_else(|| format!("`r` from 1 to 65536, found {}", found("r")))? as usize,
            lora_alpha: lora_alpha.ok_or_else(|| format!("a number `lora_alpha`, found {}", found("lora_alpha")))?,
            lora_dropout: dropout.ok_or_else(|| format!("`lora_dropout` from 0 to below 1, found {}", found("lora_dropout")))?,
            target_modules: PeftTargets::read(table).ok_or_else(|| {
                format!("`target_modules` as a list of names or \"all-linear\", found {}", found("target_modules"))
            })?,
            base_model: table.get("base_model_name_or_path").and_then(Value::as_str).map(String::from),
        })
    }
}

impl PeftTargets {
    fn read(table: &Map<String, Value>) -> Option<Self> {
        match table.get("target_modules")? {
            Value::String(text) if text == "all-linear" => Some(Self::AllLinear),
            // A text is a regular expression over whole module names: a single name would match nothing.
            Value::Array(list) if !list.is_empty() => {
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
        let target_modules = PeftTargets::Names(names);
        PeftConfig { r: 4, lora_alpha: 8.0, lora_dropout: 0.0, target_modules, base_model: Some("model".into()) }
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

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        let cases = [
            ("use_dora", json!(true)),
            ("use_rslora", json!(true)),
            ("bias", json!("lora_only")),
            ("modules_to_save", json!(["lm_head"])),
            ("rank_pattern", json!({"q_proj": 8})),
            ("alpha_pattern", json!({"q_proj": 8})),
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
        ] {
            let error = read(&with(key, value)).unwrap_err().to_string();
            assert!(error.contains("expected") && error.contains("found") && error.contains(key), "{error}");
        }
    }
}
