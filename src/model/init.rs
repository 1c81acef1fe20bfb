//! New models with random weights, for tests, demonstrations and benchmarks.

use std::path::Path;

use serde_json::{Map, Value, json};
use tch::{Device, Kind, Tensor};

use super::config::ModelConfig;
use super::families;
use super::layout;
use super::quantised::QUANTISATION;
use super::random;
use crate::files::{self, put_new_dir, read_json, to_json, write_atomic};
use crate::store::{pt_metadata, save_tensors};
use crate::units::{Fault, abridged};

/// Contents of the token that ends a text, the most usual first.
const END_TOKENS: [&str; 4] = ["<|endoftext|>", "</s>", "<eos>", "<|im_end|>"];
const PAD_TOKENS: [&str; 3] = ["<|pad|>", "<pad>", "[PAD]"];

/// Writes a model directory with random weights: `config` is the path of a `config.json`, whose `vocab_size` and special tokens
/// are made to fit the tokenizer where there is one, and whose `dtype` says how the weights are stored (f32 where it doesn't say).
///
/// A tensor's numbers depend on `seed` and its name alone: matrices are normal with `initializer_range`, norms multiply by 1,
/// biases are 0.
pub fn init_model(config: &Path, tokenizer_json: Option<&[u8]>, out_dir: &Path, seed: u64) -> Result<ModelConfig, Fault> {
    let mut object = families::unwrapped(&read_json(config)?).into_owned();
    // The weights that are drawn are packed in no way.
    object.remove(QUANTISATION);
    let mut tokenizer_config = tokenizer_json.map(|json| fit_to_tokenizer(&mut object, json)).transpose()?;
    let checked = ModelConfig::of_file(config, &object)?;
    if let Some(config) = &mut tokenizer_config {
        config["model_max_length"] = json!(checked.max_position_embeddings);
    }
    if let Some(family) = families::find(checked.model_type) {
        object.entry("architectures").or_insert_with(|| json!([family.architecture]));
    }
    files::require_unused(out_dir)?;
    let write = |dir: &Path| {
        if let Some((json, config)) = tokenizer_json.zip(tokenizer_config.as_ref()) {
            write_atomic(&dir.join("tokenizer.json"), json)?;
            write_atomic(&dir.join("tokenizer_config.json"), &to_json(config))?;
        }
        write_model(dir, &checked, &object, seed)
    };
    // What is there already, a volume say, or where a shell stands, keeps its place.
    let written = if out_dir.exists() { write(out_dir) } else { put_new_dir(out_dir, write) };
    written.map(|()| checked)
}

fn write_model(out_dir: &Path, checked: &ModelConfig, object: &Map<String, Value>, seed: u64) -> Result<(), Fault> {
    let kind = checked.weight_kind.unwrap_or(Kind::Float);
    save_tensors(&out_dir.join("model.safetensors"), &draw(checked, kind, seed), &pt_metadata())?;
    let write = |name: &str, value: &Value| write_atomic(&out_dir.join(name), &to_json(value));
    if let Some(eos) = object.get("eos_token_id") {
        write("generation_config.json", &json!({"_from_model_config": true, "eos_token_id": eos}))?;
    }
    // Last, so that a directory which wasn't finished is no model.
    write("config.json", &Value::Object(object.clone()))
}

/// The tensors of a model with random weights.
pub(super) fn draw(config: &ModelConfig, kind: Kind, seed: u64) -> Vec<(String, Tensor)> {
    let normal = |name: &str, shape: &[i64]| random::normal(seed, name, shape, config.initializer_range).to_kind(kind);
    let fill = |entry: layout::TensorEntry| {
        let tensor = entry.filled(kind, Device::Cpu, |shape| normal(&entry.name, shape));
        (entry.name, tensor)
    };
    layout::entries(config).into_iter().map(fill).collect()
}

/// Puts vocabulary and special tokens of a tokenizer into a `config.json`. Returns a `tokenizer_config.json`, but for the longest text.
fn fit_to_tokenizer(object: &mut Map<String, Value>, tokenizer_json: &[u8]) -> Result<Value, Fault> {
    let fault = |message: String| {
        let message = format!("the tokenizer is not usable: {}", abridged(message));
        Fault::data(message, "give the contents of a `tokenizer.json` that has a vocabulary")
    };
    let value: Value = serde_json::from_slice(tokenizer_json).map_err(|error| fault(error.to_string()))?;
    let vocab = match &value["model"]["vocab"] {
        Value::Object(ids) => ids.values().filter_map(Value::as_u64).max(),
        // Unigram lists its tokens, and the place in the list is the id.
        Value::Array(list) => (list.len() as u64).checked_sub(1),
        _ => None,
    };
    let none = Vec::new();
    let added = value["added_tokens"].as_array().unwrap_or(&none);
    let added: Vec<(&str, u64)> = added.iter().filter_map(|t| Some((t["content"].as_str()?, t["id"].as_u64()?))).collect();
    let largest = vocab.into_iter().chain(added.iter().map(|(_, id)| *id)).max();
    let largest = largest.ok_or_else(|| fault("no token in `model.vocab` or `added_tokens`".into()))?;
    let find = |contents: &[&str]| contents.iter().find_map(|content| added.iter().find(|(added, _)| added == content));
    let (end, pad) = (find(&END_TOKENS), find(&PAD_TOKENS));
    object.insert("vocab_size".into(), json!(largest + 1));
    object.insert("bos_token_id".into(), Value::Null);
    object.insert("eos_token_id".into(), json!(end.map(|(_, id)| id)));
    object.insert("pad_token_id".into(), json!(pad.map(|(_, id)| id)));
    Ok(json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": null, "eos_token": end.map(|(content, _)| content),
        "pad_token": pad.map(|(content, _)| content), "model_max_length": null, "clean_up_tokenization_spaces": false,
    }))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::model::Model;
    use crate::recipe::Dtype;

    fn fixture(name: &str) -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2").join(name)
    }

    #[test]
    fn a_new_model_loads_and_fits_its_tokenizer() {
        let home = tempfile::tempdir().unwrap();
        let tokenizer = fs::read(fixture("tokenizer.json")).unwrap();
        let mut object: Map<String, Value> = read_json(&fixture("config.json")).unwrap();
        object.extend(json!({"vocab_size": 7, "tie_word_embeddings": false, "dtype": "bfloat16"}).as_object().unwrap().clone());
        let config_path = home.path().join("config.json");
        fs::write(&config_path, Value::Object(object).to_string()).unwrap();

        let out = home.path().join("new/model");
        let config = init_model(&config_path, Some(&tokenizer), &out, 1).unwrap();
        assert_eq!(config.vocab_size, 512);
        let model = Model::load(&out, Dtype::F32, Device::Cpu).unwrap();
        assert_eq!(*model.config(), config);
        // 3 layers of attention, MLP and two norms; embedding, output projection, final norm.
        let layer = 2 * 64 * 64 + 2 * 32 * 64 + 64 + 2 * 32 + 3 * 64 * 176 + 2 * 64;
        assert_eq!(config.num_parameters(), 3 * layer + 2 * 512 * 64 + 64);
        assert_eq!(model.weight_bytes().0, 4 * config.num_parameters() as u64);
        for (name, key, expected) in [
            ("generation_config.json", "eos_token_id", json!(0)),
            ("tokenizer_config.json", "eos_token", json!("<|endoftext|>")),
            ("tokenizer_config.json", "pad_token", json!("<|pad|>")),
            ("config.json", "vocab_size", json!(512)),
            ("config.json", "pad_token_id", json!(3)),
        ] {
            assert_eq!(read_json::<Value>(&out.join(name)).unwrap()[key], expected, "{name} {key}");
        }

        // Only the language model inside another one is made, and in no packed form.
        let inner: Value = read_json(&config_path).unwrap();
        let packed = json!({"quant_method": "fp8"});
        let outer =
            json!({"model_type": "a_wrapper", "text_config": inner, "tie_word_embeddings": false, "quantization_config": packed});
        let (outer_path, inside) = (home.path().join("outer.json"), home.path().join("inside"));
        fs::write(&outer_path, outer.to_string()).unwrap();
        init_model(&outer_path, Some(&tokenizer), &inside, 1).unwrap();
        assert_eq!(*Model::load(&inside, Dtype::F32, Device::Cpu).unwrap().config(), config);

        let error = init_model(&config_path, Some(&tokenizer), &out, 1).unwrap_err();
        assert!(error.to_string().ends_with("exists and is not empty") && error.hint().is_some(), "{error}");
        let again = home.path().join("again");
        init_model(&config_path, Some(&tokenizer), &again, 1).unwrap();
        let bytes = |dir: &Path| fs::read(dir.join("model.safetensors")).unwrap();
        assert!(bytes(&out) == bytes(&again), "one seed, two models");
    }

    #[test]
    fn a_tokenizer_without_tokens_is_refused() {
        for text in ["{}", "no json", "{\"model\": {\"vocab\": {}}}", "{\"model\": {\"vocab\": []}}"] {
            let error = init_model(&fixture("config.json"), Some(text.as_bytes()), Path::new("unused"), 1).unwrap_err();
            assert!(error.to_string().starts_with("the tokenizer is not usable"), "{text}: {error}");
        }
    }
}
