//! Frozen weights in few bits as the formats' own libraries unpack them: configuration, logits, loss and gradients.

use std::fs;

use kvtune::model::{Adapter, Model, ModelConfig};
use kvtune::recipe::Dtype;
use serde_json::Value;
use tch::{Device, no_grad};

use super::dense::{Golden, assert_family, fixture, logits};
use crate::support;

/// What the fixtures hold of each case, by the beginning of their names.
fn cases(prefix: &str, suffix: &str) -> Vec<String> {
    let names = fs::read_dir(fixture("quantised")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter_map(|name| Some(name.strip_prefix(prefix)?.strip_suffix(suffix)?.to_owned())).collect()
}

#[test]
fn logits_loss_and_gradients() {
    let cases = cases("dense-", ".safetensors");
    assert_eq!(cases.len(), 16, "{cases:?}");
    for case in cases {
        let golden = Golden::of_model(&fixture(&format!("quantised/dense-{case}.safetensors")));
        support::on_one_thread();
        let base = Model::load(&fixture(&format!("quantised/model-{case}")), Dtype::F32, Device::Cpu).unwrap();
        let of_base = no_grad(|| golden.furthest_logits(&logits(&base, &golden.ids_bn.narrow(0, 0, 1)), "logits_base"));
        assert!(of_base <= 1e-4, "{case}: {of_base:e}");
        let adapter = fixture(&format!("quantised/adapter-{case}"));
        let adapter = Adapter::load_peft(&adapter, base.config(), base.kind(), Device::Cpu).unwrap();
        let [of_logits, of_loss, of_gradients] = assert_family(&base.with_adapter(adapter), &golden);
        println!("{case}: base {of_base:.1e}, logits {of_logits:.1e}, loss {of_loss:.1e}, gradients {of_gradients:.1e}");
    }
}

#[test]
fn the_keys_of_a_gguf_file_are_the_configuration_that_it_was_made_of() {
    let cases = cases("config-", ".json");
    assert_eq!(cases.len(), 5, "{cases:?}");
    for case in cases {
        let found = ModelConfig::load(&fixture(&format!("quantised/model-{case}/model.gguf"))).unwrap();
        let written = ModelConfig::load_file(&fixture(&format!("quantised/config-{case}.json"))).unwrap();
        // A GGUF file says no dtype, and nothing of how weights were drawn. Its tokenizer says which token pads.
        assert_eq!(
            found,
            ModelConfig {
                weight_kind: None,
                initializer_range: found.initializer_range,
                pad_token_id: found.pad_token_id,
                packed: found.packed.clone(),
                ..written
            },
            "{case}"
        );
    }
}

#[test]
fn broken_files_are_named_with_what_is_wrong() {
    let broken: Vec<Value> = serde_json::from_slice(&fs::read(fixture("quantised/broken.json")).unwrap()).unwrap();
    let mut seen = 0;
    for case in &broken {
        let path = case["path"].as_str().unwrap();
        seen += 1;
        let error = Model::load(&fixture(&format!("quantised/{path}")), Dtype::F32, Device::Cpu).unwrap_err();
        let text = error.to_string();
        let says = |word: &Value| text.contains(word.as_str().unwrap());
        let has = |word: &Value| word.as_array().map_or_else(|| says(word), |any| any.iter().any(says));
        assert!(error.hint().is_some() && case["names"].as_array().unwrap().iter().all(has), "{path}: {text}");
    }
    assert_eq!(seen, 17);
}
