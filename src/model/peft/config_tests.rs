//! Settings of adapters in PEFT's files: read, written and refused.

use serde_json::{Map, Value, json};

use super::config::*;
use crate::files::to_json;
use crate::recipe::{InitLora, ModuleSet, Recipe, TrainedBias};
use crate::units::Fault;

fn config() -> PeftConfig {
    let names = ["q_proj", "v_proj"].map(String::from).to_vec();
    PeftConfig { base_model: Some("model".into()), ..PeftConfig::plain(4, 8.0, 0.0, ModuleSet::Names(names)) }
}

fn read(text: &[u8]) -> Result<PeftConfig, Fault> {
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
    assert_eq!(read(text.as_bytes()).unwrap(), config());
    let other = PeftConfig { lora_alpha: 0.5, target_modules: ModuleSet::AllLinear, base_model: None, ..config() };
    assert_eq!(read(&other.to_json()).unwrap(), other);
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
    let read_config = read(text.as_bytes()).unwrap();
    let scale = |module: &str| (read_config.rank_of(module), (read_config.scale_of(module) * 1e6).round());
    assert_eq!(scale("model.layers.0.self_attn.q_proj"), (16, 2e6));
    assert_eq!(scale("model.layers.0.self_attn.k_proj"), (9, 2e6));
    assert_eq!(scale("model.layers.1.self_attn.k_proj"), (9, 166_667.0));
    assert_eq!(scale("model.layers.0.mlp.up_proj"), (4, 4e6));
    assert!(read_config.exclude_modules.names("model.layers.0.self_attn.o_proj"));
    let written = read_config.to_json();
    assert_eq!(read(&written).unwrap(), read_config);
    let written = String::from_utf8(written).unwrap();
    let places = ["q_proj\": 16", "self_attn.*\": 9", "[a-z]_proj\": 2"].map(|pair| written.find(pair).unwrap());
    assert!(places.is_sorted() && written.contains("\"k_proj\": 6\n") && written.contains("\"layers.1.*\": 0.5"), "{written}");
}

#[test]
fn each_kind_is_read_as_it_is_written() {
    let matching = || ModuleSet::matching(r".*\.(q|v)_proj").unwrap();
    let all = [
        PeftConfig { target_modules: matching(), ..config() },
        PeftConfig { layers_to_transform: vec![0, 2], ..config() },
        PeftConfig { lora_bias: true, ..config() },
        PeftConfig { bias: TrainedBias::LoraOnly, ..config() },
        PeftConfig { bias: TrainedBias::All, ..config() },
        PeftConfig { use_dora: true, ..config() },
        PeftConfig { init: InitLora::Gaussian, ..config() },
    ];
    for config in all {
        assert_eq!(read(&config.to_json()).unwrap(), config);
    }
    assert_eq!(read(&with("layers_to_transform", json!(1))).unwrap().layers_to_transform, [1]);
}

#[test]
fn what_cannot_be_honoured_is_refused_by_name() {
    let cases = [
        ("bias", json!("some")),
        ("use_qalora", json!(true)),
        ("init_lora_weights", json!("pissa_niter_16")),
        ("init_lora_weights", json!("unheard")),
        ("loftq_config", json!({"bits": 4})),
        ("peft_type", json!("IA3")),
        ("task_type", json!("TOKEN_CLS")),
    ];
    for (key, value) in cases {
        let error = read(&with(key, value)).unwrap_err();
        assert!(error.to_string().contains("asks for what is not supported") && error.to_string().contains(key), "{error}");
    }
}

#[test]
fn unknown_keys_and_harmless_ones_are_left_alone() {
    assert_eq!(read(&with("brand_new", json!(3))).unwrap(), config());
    assert_eq!(read(&with("modules_to_save", json!([]))).unwrap(), config());
    assert_eq!(read(&with("init_lora_weights", json!("eva"))).unwrap(), config());
}

/// PEFT writes `null` where parameters alone are targets, and a recipe that leaves the targets out means them.
#[test]
fn there_may_be_parameters_alone() {
    let dir = tempfile::tempdir().unwrap();
    for none in [Value::Null, json!([])] {
        let mut table: Map<String, Value> = serde_json::from_slice(&with("target_modules", none)).unwrap();
        table.insert("target_parameters".into(), json!(["experts.down_proj"]));
        let read = read(&to_json(&table)).unwrap();
        assert!(read.target_modules == ModuleSet::NONE && read.target_parameters == ["experts.down_proj"]);
        std::fs::write(dir.path().join("adapter_config.json"), to_json(&table)).unwrap();
        let text = format!("model = {{path = '.', adapter = '{}'}}\n[lora]\n", dir.path().display())
            + "[data]\nformat = 'tokens'\ntrain = 't'\n[kv_cache]\ncache_length = 8\nchunk_size = 4";
        let lora = Recipe::parse(text, "r.toml".as_ref(), &[]).unwrap().recipe.lora.unwrap();
        assert_eq!((lora.target_modules, lora.target_parameters), (ModuleSet::Names(vec![]), read.target_parameters));
    }
}

#[test]
fn wrong_values_say_what_was_expected_and_found() {
    for (key, value) in [
        ("r", json!(0)),
        ("r", json!("8")),
        ("lora_alpha", Value::Null),
        ("lora_alpha", json!(-1)),
        ("lora_dropout", json!(1.5)),
        ("target_modules", json!("(q_proj")),
        ("layers_to_transform", json!("1")),
        ("layers_to_transform", json!([-1])),
        ("use_dora", json!("yes")),
        ("target_modules", json!([])),
        ("target_modules", Value::Null),
        ("use_rslora", json!("yes")),
        ("rank_pattern", json!({"q_proj": 0})),
        ("rank_pattern", json!({"q_proj": 2.5})),
        ("rank_pattern", json!([1])),
        ("rank_pattern", json!({"q_proj(": 2})),
        ("alpha_pattern", json!({"q_proj": "8"})),
        ("alpha_pattern", json!({"q_proj": 0})),
        ("exclude_modules", json!([1])),
        ("exclude_modules", json!("[")),
        ("exclude_modules", json!({"q_proj": 1})),
    ] {
        let error = read(&with(key, value)).unwrap_err().to_string();
        assert!(error.contains("adapter_config.json`: expected") && error.contains("found") && error.contains(key), "{error}");
    }
}
