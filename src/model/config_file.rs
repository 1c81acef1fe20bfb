//! `config.json`, checked: sizes within bounds before anything is allocated, and nothing ignored that would change the numbers.

use std::path::Path;

use serde_json::{Map, Value};
use tch::Kind;

use super::ModelError;
use super::config::ModelConfig;
use super::families::{self, Family, MAX_HIDDEN, layers};
use super::fields::{ConfigFault, Fields, shown};
use crate::files::read_json;

const MAX_VOCAB: usize = 1 << 22;
const MAX_POSITIONS: usize = 1 << 31;
/// 2^43 weights are 16 TiB in bf16.
const MAX_WEIGHTS: usize = 1 << 43;

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
        let config = Self {
            model_type: family.model_type,
            hidden_size: fields.count("hidden_size", MAX_HIDDEN)?,
            layers: layers(fields, family)?,
            vocab_size: fields.count("vocab_size", MAX_VOCAB)?,
            max_position_embeddings: fields.count("max_position_embeddings", MAX_POSITIONS)?,
            rms_norm_eps: fields.number_or("rms_norm_eps", 1e-6)?,
            tie_word_embeddings: fields.flag_or("tie_word_embeddings", family.tied_by_default)?,
            initializer_range: fields.number_or("initializer_range", 0.02)?,
            weight_kind: weight_kind(fields)?,
        };
        if config.num_parameters() > MAX_WEIGHTS {
            return Err(fields.range("num_hidden_layers", "fewer than 2^43 weights altogether".into()));
        }
        Ok(config)
    }
}

fn family(fields: Fields<'_>) -> Result<&'static Family, ConfigFault> {
    let found = fields.get("model_type").map(|value| value.as_str().map_or_else(|| shown(value), str::to_owned));
    let family = found.as_deref().and_then(families::find);
    family.ok_or_else(|| ConfigFault::UnknownFamily { found, known: families::known() })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::spec::{AttentionSpec, FeedForwardSpec, LayerSpec, RopeSpec, ScoreRule};
    use crate::units::Failure;
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
        let attention = AttentionSpec {
            num_heads: 4,
            num_kv_heads: 2,
            head_dim: 16,
            rule: ScoreRule::scaled(0.25),
            rope: RopeSpec { theta: 1e6 },
            has_qk_norm: false,
            has_qkv_bias: true,
        };
        let layer = LayerSpec { attention, feed_forward: FeedForwardSpec::Dense { intermediate_size: 176 } };
        assert_eq!((old.layers, old.weight_kind), (vec![layer; 3], Some(Kind::BFloat16)));
    }

    #[test]
    fn layers_slide_as_their_types_say_or_from_a_number_on() {
        let windows = |changes: &Value| {
            let layers = config(changes).unwrap().layers;
            layers.iter().map(|layer| layer.attention.rule.window).collect::<Vec<_>>()
        };
        let (on, off) = (json!({"use_sliding_window": true, "sliding_window": 24}), json!({"sliding_window": 24}));
        let with = |base: &Value, more: &Value| {
            let mut all = base.clone();
            all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            windows(&all)
        };
        assert_eq!(with(&off, &json!({"max_window_layers": 0})), [None; 3]);
        assert_eq!(with(&on, &json!({})), [None; 3], "the default of `max_window_layers` is 28");
        assert_eq!(with(&on, &json!({"max_window_layers": 1})), [None, Some(24), Some(24)]);
        let types = json!(["sliding_attention", "full_attention", "sliding_attention"]);
        assert_eq!(with(&on, &json!({"layer_types": types, "max_window_layers": 1})), [Some(24), None, Some(24)]);
        assert_eq!(windows(&json!({"use_sliding_window": true, "max_window_layers": 0})), [Some(4096); 3]);
        let null = json!({"use_sliding_window": true, "max_window_layers": 0, "sliding_window": null});
        assert_eq!(windows(&null), [None; 3]);
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
            (json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}), "rope_scaling"),
            (json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}), "rope_scaling"),
            (json!({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}}), "rope_parameters"),
            (json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}), "rope_parameters"),
            (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
            (json!({"hidden_act": "gelu"}), "hidden_act"),
            (json!({"attention_dropout": 0.1}), "attention_dropout"),
            (json!({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}), "layer_types"),
            (json!({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}), "layer_types"),
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
            (json!({"layer_types": ["full_attention"]}), "layer_types"),
            (json!({"use_sliding_window": true, "sliding_window": 0}), "sliding_window"),
            (json!({"use_sliding_window": true, "max_window_layers": -1}), "max_window_layers"),
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
