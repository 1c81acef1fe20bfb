//! `config.json`, checked: sizes within bounds before anything is allocated, and nothing ignored that would change the numbers.

use std::fmt;
use std::path::Path;

use serde_json::{Map, Value};
use tch::Kind;

use super::ModelError;
use super::families::{self, Family, Variant};
use super::layout;
use crate::files::read_json;
use crate::units::Hint;

const MAX_HIDDEN: usize = 1 << 16;
const MAX_INTERMEDIATE: usize = 1 << 20;
const MAX_LAYERS: usize = 1 << 10;
const MAX_HEADS: usize = 1 << 10;
const MAX_HEAD_DIM: usize = 1 << 12;
const MAX_VOCAB: usize = 1 << 22;
const MAX_POSITIONS: usize = 1 << 31;
/// 2^43 weights are 16 TiB in bf16.
const MAX_WEIGHTS: usize = 1 << 43;

/// What a model is, from its `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family's name in `config.json`.
    pub model_type: &'static str,
    /// E, the width of the residual stream.
    pub hidden_size: usize,
    /// L.
    pub num_layers: usize,
    /// H, query heads.
    pub num_heads: usize,
    /// G, heads of keys and values; divides H.
    pub num_kv_heads: usize,
    /// D, even.
    pub head_dim: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// V.
    pub vocab_size: usize,
    /// The longest sequence the model was made for.
    pub max_position_embeddings: usize,
    /// The epsilon of all norms.
    pub rms_norm_eps: f64,
    /// The output projection is the embedding.
    pub tie_word_embeddings: bool,
    /// The base of the rotary frequencies.
    pub rope_theta: f64,
    /// Standard deviation of newly drawn weights.
    pub initializer_range: f64,
    /// The dtype the weights are said to be stored in.
    pub weight_kind: Option<Kind>,
    /// How the layers differ from the plain one.
    pub variant: Variant,
}

impl ModelConfig {
    /// Reads `config.json` in `dir`.
    pub fn load(dir: &Path) -> Result<Self, ModelError> {
        Self::load_file(&dir.join("config.json"))
    }

    /// Reads a `config.json`, whatever its name.
    pub fn load_file(path: &Path) -> Result<Self, ModelError> {
        let object: Map<String, Value> = read_json(path)?;
        Self::from_object(&object).map_err(|fault| ModelError::Config { path: path.into(), fault })
    }

    /// Checks the keys of a `config.json`; those it doesn't know are left alone.
    pub fn from_object(object: &Map<String, Value>) -> Result<Self, ConfigFault> {
        let fields = Fields(object);
        let family = family(fields)?;
        refuse_unbuilt(fields)?;
        let num_heads = fields.count("num_attention_heads", MAX_HEADS)?;
        let hidden_size = fields.count("hidden_size", MAX_HIDDEN)?;
        let config = Self {
            model_type: family.model_type,
            hidden_size,
            num_layers: fields.count("num_hidden_layers", MAX_LAYERS)?,
            num_heads,
            num_kv_heads: fields.count_or("num_key_value_heads", num_heads, num_heads)?,
            head_dim: fields.count_or("head_dim", hidden_size / num_heads, MAX_HEAD_DIM)?,
            intermediate_size: fields.count("intermediate_size", MAX_INTERMEDIATE)?,
            vocab_size: fields.count("vocab_size", MAX_VOCAB)?,
            max_position_embeddings: fields.count("max_position_embeddings", MAX_POSITIONS)?,
            rms_norm_eps: fields.number_or("rms_norm_eps", 1e-6)?,
            tie_word_embeddings: fields.flag_or("tie_word_embeddings", family.tied_by_default)?,
            rope_theta: rope_theta(fields, family.default_rope_theta)?,
            initializer_range: fields.number_or("initializer_range", 0.02)?,
            weight_kind: weight_kind(fields)?,
            variant: (family.resolve)(fields)?,
        };
        config.check_shapes(fields)?;
        Ok(config)
    }

    /// The factor on `q · k`.
    pub fn scale(&self) -> f64 {
        1.0 / (self.head_dim as f64).sqrt()
    }

    /// How many weights the model has.
    pub fn num_parameters(&self) -> usize {
        layout::entries(self).iter().map(|entry| entry.shape.iter().product::<usize>()).sum()
    }

    fn check_shapes(&self, fields: Fields<'_>) -> Result<(), ConfigFault> {
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(fields.range("num_key_value_heads", format!("a divisor of `num_attention_heads` = {}", self.num_heads)));
        }
        let heads = format!("a multiple of `num_attention_heads` = {}, or a `head_dim`", self.num_heads);
        if fields.get("head_dim").is_none() && !self.hidden_size.is_multiple_of(self.num_heads) {
            return Err(fields.range("hidden_size", heads));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            let key = if fields.get("head_dim").is_some() { "head_dim" } else { "hidden_size" };
            return Err(fields.range(key, "an even `head_dim`, whose halves are turned against each other".into()));
        }
        if self.num_weights().is_none_or(|weights| weights > MAX_WEIGHTS) {
            return Err(fields.range("num_hidden_layers", "fewer than 2^43 weights altogether".into()));
        }
        Ok(())
    }

    fn num_weights(&self) -> Option<usize> {
        let attention = self.head_dim.checked_mul(2 * (self.num_heads + self.num_kv_heads))?;
        let layer = self.hidden_size.checked_mul(attention.checked_add(3 * self.intermediate_size)?)?;
        let ends = self.vocab_size.checked_mul(self.hidden_size)?.checked_mul(2)?;
        layer.checked_mul(self.num_layers)?.checked_add(ends)
    }
}

fn family(fields: Fields<'_>) -> Result<&'static Family, ConfigFault> {
    let found = fields.get("model_type").map(|value| value.as_str().map_or_else(|| shown(value), str::to_owned));
    let family = found.as_deref().and_then(families::find);
    family.ok_or_else(|| ConfigFault::UnknownFamily { found, known: families::known() })
}

/// What would change the numbers, in any family, and isn't built.
fn refuse_unbuilt(fields: Fields<'_>) -> Result<(), ConfigFault> {
    fields.only("hidden_act", "silu")?;
    fields.only("attention_dropout", 0.0)?;
    fields.only("partial_rotary_factor", 1.0)?;
    if let Some(found) = fields.get("quantization_config") {
        return Err(ConfigFault::Unsupported { key: "quantization_config", found: shown(found), supported: "null".into() });
    }
    if let Some(Value::Array(kinds)) = fields.get("layer_types")
        && let Some(kind) = kinds.iter().find(|kind| kind.as_str() != Some("full_attention"))
    {
        let supported = "`full_attention` in every layer".into();
        return Err(ConfigFault::Unsupported { key: "layer_types", found: shown(kind), supported });
    }
    Ok(())
}

/// The base of the rotary frequencies, in either spelling: `rope_theta` beside `rope_scaling`, or both in `rope_parameters`.
fn rope_theta(fields: Fields<'_>, default: f64) -> Result<f64, ConfigFault> {
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(value) = fields.get(key) else { continue };
        let unsupported = || ConfigFault::Unsupported { key, found: shown(value), supported: "the type `default`".into() };
        let rope = value.as_object().ok_or_else(unsupported)?;
        let is_default = |name: &str| rope.get(name).is_none_or(|kind| kind.as_str() == Some("default"));
        let is_nested = rope.values().any(Value::is_object);
        if is_nested || !is_default("rope_type") || !is_default("type") {
            return Err(unsupported());
        }
        Fields(rope).only("partial_rotary_factor", 1.0)?;
    }
    let inner = |key| fields.get(key).and_then(Value::as_object).filter(|rope| rope.contains_key("rope_theta"));
    let Some(rope) = inner("rope_parameters").or_else(|| inner("rope_scaling")) else {
        return fields.number_or("rope_theta", default);
    };
    let theta = Fields(rope).number_or("rope_theta", default)?;
    let outer = fields.number_or("rope_theta", theta)?;
    #[expect(clippy::float_cmp, reason = "two spellings of one literal are equal to the bit")]
    if outer != theta {
        return Err(fields.range("rope_theta", format!("{theta} as in `rope_parameters`")));
    }
    Ok(theta)
}

fn weight_kind(fields: Fields<'_>) -> Result<Option<Kind>, ConfigFault> {
    let Some((key, value)) = ["dtype", "torch_dtype"].into_iter().find_map(|key| Some((key, fields.get(key)?))) else {
        return Ok(None);
    };
    match value.as_str().map(|name| name.strip_prefix("torch.").unwrap_or(name)) {
        Some("float32") => Ok(Some(Kind::Float)),
        Some("bfloat16") => Ok(Some(Kind::BFloat16)),
        Some("float16") => Ok(Some(Kind::Half)),
        Some("float64") => Ok(Some(Kind::Double)),
        Some("auto") => Ok(None),
        _ => Err(fields.range(key, "`float32`, `bfloat16`, `float16` or `float64`".into())),
    }
}

/// The keys of a JSON object, read with checks; `null` counts as absent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields<'a>(pub(super) &'a Map<String, Value>);

impl<'a> Fields<'a> {
    /// The value of a key.
    pub(super) fn get(self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    /// A whole number from 1 to `max` that must be there.
    pub(super) fn count(self, key: &'static str, max: usize) -> Result<usize, ConfigFault> {
        if self.get(key).is_none() {
            return Err(ConfigFault::Missing { key, expected: "a whole number" });
        }
        self.count_or(key, 0, max)
    }

    /// A whole number from 1 to `max`, or `default` where there is none.
    pub(super) fn count_or(self, key: &'static str, default: usize, max: usize) -> Result<usize, ConfigFault> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok()).filter(|count| (1..=max).contains(count));
        count.ok_or_else(|| self.range(key, format!("a whole number from 1 to {max}")))
    }

    /// A positive number, or `default`.
    pub(super) fn number_or(self, key: &'static str, default: f64) -> Result<f64, ConfigFault> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let number = value.as_f64().filter(|number| number.is_finite() && *number > 0.0);
        number.ok_or_else(|| self.range(key, "a positive number".into()))
    }

    /// `true` or `false`, or `default`.
    pub(super) fn flag_or(self, key: &'static str, default: bool) -> Result<bool, ConfigFault> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.range(key, "`true` or `false`".into()))
    }

    /// Refuses any value but the one that is built; a missing key stands for it.
    pub(super) fn only(self, key: &'static str, built: impl Into<Value>) -> Result<(), ConfigFault> {
        let built = built.into();
        match self.get(key) {
            // 0 and 0.0 are the same number, but not the same JSON value.
            Some(found) if *found != built && (found.as_f64().is_none() || found.as_f64() != built.as_f64()) => {
                Err(ConfigFault::Unsupported { key, found: shown(found), supported: format!("`{built}`") })
            }
            _ => Ok(()),
        }
    }

    fn range(self, key: &'static str, expected: String) -> ConfigFault {
        ConfigFault::OutOfRange { key, expected, found: self.get(key).map_or_else(|| "nothing".into(), shown) }
    }
}

/// A value as it is shown in an error: on one line, and cut.
fn shown(value: &Value) -> String {
    const LONGEST: usize = 60;
    let text = value.to_string();
    if text.chars().count() <= LONGEST {
        return text;
    }
    text.chars().take(LONGEST).chain("…".chars()).collect()
}

/// What is wrong with `config.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigFault {
    /// The family isn't known.
    UnknownFamily {
        /// Its `model_type`.
        found: Option<String>,
        /// Those that are known.
        known: Vec<&'static str>,
    },
    /// A key must be there.
    Missing {
        /// The key.
        key: &'static str,
        /// What is expected.
        expected: &'static str,
    },
    /// A value is of the wrong type or out of bounds.
    OutOfRange {
        /// The key.
        key: &'static str,
        /// What is expected.
        expected: String,
        /// What stands there.
        found: String,
    },
    /// A value asks for what isn't built.
    Unsupported {
        /// The key.
        key: &'static str,
        /// What stands there.
        found: String,
        /// What is built.
        supported: String,
    },
}

impl fmt::Display for ConfigFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownFamily { found: Some(found), known } => {
                write!(f, "unknown `model_type` `{found}`, expected one of `{}`", known.join("`, `"))
            }
            Self::UnknownFamily { found: None, known } => {
                write!(f, "no `model_type`, expected one of `{}`", known.join("`, `"))
            }
            Self::Missing { key, expected } => write!(f, "`{key}` is missing, expected {expected}"),
            Self::OutOfRange { key, expected, found } => write!(f, "`{key}` is {found}, expected {expected}"),
            Self::Unsupported { key, found, supported } => {
                write!(f, "`{key}` is {found}, which is not supported: expected {supported}")
            }
        }
    }
}

impl Hint for ConfigFault {
    fn hint(&self) -> Option<String> {
        Some(match self {
            Self::UnknownFamily { .. } => "use a model of a known family".into(),
            Self::Missing { .. } | Self::OutOfRange { .. } => "take `config.json` from the model's source again".into(),
            Self::Unsupported { key, .. } => format!("use a model without this, or correct `{key}` if the model doesn't need it"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Projection;
    use serde_json::json;

    fn config(changes: &Value) -> Result<ModelConfig, ConfigFault> {
        let mut object = json!({
            "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 176, "vocab_size": 512, "max_position_embeddings": 32768, "rope_theta": 1e6, "hidden_act": "silu",
        });
        let target = object.as_object_mut().unwrap();
        for (key, value) in changes.as_object().unwrap() {
            target.insert(key.clone(), value.clone());
        }
        ModelConfig::from_object(target)
    }

    #[test]
    fn both_spellings_of_one_model_are_equal() {
        let old = config(&json!({"rope_scaling": null, "torch_dtype": "bfloat16", "attention_dropout": 0.0})).unwrap();
        let new = config(&json!({
            "rope_theta": null, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000}, "dtype": "bfloat16",
            "layer_types": ["full_attention", "full_attention", "full_attention"], "attention_dropout": 0,
        }));
        assert_eq!(old, new.unwrap());
        assert_eq!((old.rope_theta, old.head_dim, old.weight_kind), (1e6, 16, Some(Kind::BFloat16)));
        assert_eq!(
            old.variant,
            Variant { biased: vec![Projection::Query, Projection::Key, Projection::Value], has_qk_norm: false }
        );
    }

    #[test]
    fn an_unknown_family_is_named_with_those_that_are_known() {
        let fault = config(&json!({"model_type": "mamba"})).unwrap_err();
        assert_eq!(fault.to_string(), "unknown `model_type` `mamba`, expected one of `qwen2`");
        let fault = config(&json!({"model_type": null})).unwrap_err();
        assert_eq!(fault.to_string(), "no `model_type`, expected one of `qwen2`");
    }

    #[test]
    fn what_is_not_built_is_refused() {
        for (changes, key) in [
            (json!({"use_sliding_window": true}), "use_sliding_window"),
            (json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}), "rope_scaling"),
            (json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}), "rope_scaling"),
            (json!({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}}), "rope_parameters"),
            (json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}), "rope_parameters"),
            (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
            (json!({"hidden_act": "gelu"}), "hidden_act"),
            (json!({"attention_dropout": 0.1}), "attention_dropout"),
            (json!({"layer_types": ["full_attention", "sliding_attention"]}), "layer_types"),
            (json!({"quantization_config": {"bits": 4}}), "quantization_config"),
        ] {
            let fault = config(&changes).unwrap_err();
            assert!(matches!(&fault, ConfigFault::Unsupported { key: k, .. } if *k == key), "{key}: {fault}");
            assert!(fault.hint().is_some());
        }
    }

    #[test]
    fn sizes_out_of_bounds_are_refused_before_anything_is_allocated() {
        for (changes, key) in [
            (json!({"hidden_size": 1_000_000}), "hidden_size"),
            (json!({"hidden_size": -64}), "hidden_size"),
            (json!({"hidden_size": "64"}), "hidden_size"),
            (json!({"num_hidden_layers": 0}), "num_hidden_layers"),
            (json!({"vocab_size": 5_000_000}), "vocab_size"),
            (json!({"vocab_size": 18_446_744_073_709_551_615_u64}), "vocab_size"),
            (json!({"num_key_value_heads": 3}), "num_key_value_heads"),
            (json!({"hidden_size": 66}), "hidden_size"),
            (json!({"head_dim": 15}), "head_dim"),
            (json!({"rms_norm_eps": 0.0}), "rms_norm_eps"),
            (json!({"rope_parameters": {"rope_theta": 1e4}}), "rope_theta"),
            (json!({"torch_dtype": "int4"}), "torch_dtype"),
        ] {
            let fault = config(&changes).unwrap_err();
            assert!(matches!(&fault, ConfigFault::OutOfRange { key: k, .. } if *k == key), "{key}: {fault}");
        }
        let fault = config(&json!({"vocab_size": null})).unwrap_err();
        assert_eq!(fault.to_string(), "`vocab_size` is missing, expected a whole number");
    }

    #[test]
    fn unknown_keys_are_left_alone() {
        assert!(config(&json!({"some_future_key": {"a": 1}})).is_ok());
    }
}
