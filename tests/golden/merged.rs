//! Merged models beside those that another program merged, and beside their own base with the adapter apart.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use kvtune::checkpoint;
use kvtune::export::{ExportTarget, Trained, export};
use kvtune::files::TensorFile;
use kvtune::model::{Adapter, Model, ModelConfig};
use kvtune::recipe::{Dtype, TrainedWeights};
use kvtune::store::{load_tensor, load_tensors, pt_metadata, save_tensors};
use kvtune::units::Fault;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor, no_grad};

use super::dense::{fixture, furthest, logits};
use crate::support;

/// Adapters of each kind, and their bases.
const KINDS: &[(&str, &str)] = &[
    ("model-qwen2", "adapter-qwen2"),
    ("model-qwen2", "families/adapter-qwen2-rslora"),
    ("model-qwen2", "families/adapter-qwen2-patterns"),
    ("model-qwen2", "families/adapter-qwen2-regex"),
    ("model-qwen2", "families/adapter-qwen2-layers"),
    ("model-qwen2", "families/adapter-qwen2-dora"),
    ("model-qwen2", "families/adapter-qwen2-biasloraonly"),
    ("model-qwen2", "families/adapter-qwen2-lmhead"),
    ("model-qwen2", "families/adapter-qwen2-loralmhead"),
    ("model-qwen2", "families/adapter-qwen2-doralmhead"),
    ("model-qwen2", "families/adapter-qwen2-norms"),
    ("model-qwen2", "families/adapter-qwen2-biasall"),
    ("model-qwen2", "families/adapter-qwen2-embed"),
    ("model-qwen2", "families/adapter-qwen2-loraembed"),
    ("families/model-phi3", "families/adapter-phi3"),
    ("families/model-mixtral", "families/adapter-mixtral"),
    ("families/model-mixtral", "families/adapter-mixtral-v4"),
    ("families/model-qwen3-moe", "families/adapter-qwen3-moe"),
    ("families/model-gpt-oss", "families/adapter-gpt-oss"),
    ("families/model-glm4-moe", "families/adapter-glm4-moe"),
];

const GGUF_ADAPTER: ExportTarget = ExportTarget::Gguf { whole: None, for_ollama: false };

fn adapter(base: &Path, dir: &Path) -> Adapter {
    Adapter::load_peft(dir, &ModelConfig::load(base).unwrap(), Kind::Float, Device::Cpu).unwrap()
}

fn load(dir: &Path) -> Model {
    support::on_one_thread();
    Model::load(dir, Dtype::F32, Device::Cpu).unwrap()
}

fn tensors(file: &Path) -> BTreeMap<String, Tensor> {
    load_tensors(&TensorFile::open(file).unwrap()).unwrap().into_iter().collect()
}

fn trained<'a>(base: &'a Path, checkpoint: &'a Path) -> Trained<'a> {
    Trained {
        checkpoint,
        holds: TrainedWeights::Adapter,
        base: Some(base),
        recipe: None,
        state: None,
        metrics: Vec::new(),
        results: Vec::new(),
        chat_template: None,
    }
}

fn exported(base: &Path, checkpoint: &Path, target: ExportTarget, out: &Path) -> Result<Vec<String>, Fault> {
    export(&trained(base, checkpoint), target, out, &|| true).map(|(notes, _)| notes)
}

/// Every fourth row of logits.
fn rows(logits_btv: &Tensor) -> Tensor {
    logits_btv.slice(1, 3, None, 4)
}

#[test]
fn as_another_program_merged_them() {
    for (numbers, base, adapter) in
        [("qwen2", "model-qwen2", "adapter-qwen2"), ("mixtral", "families/model-mixtral", "families/adapter-mixtral")]
    {
        let golden = TensorFile::open(&fixture(&format!("families/merged-{numbers}.safetensors"))).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("merged");
        exported(&fixture(base), &fixture(adapter), ExportTarget::Merged, &out).unwrap();
        let merged = tensors(&out.join("model.safetensors"));
        let weights: Vec<String> = golden.names().into_iter().filter(|name| name.starts_with("weight.")).collect();
        assert!(weights.len() >= 3);
        for name in weights {
            let error = furthest(&merged[&name["weight.".len()..]], &load_tensor(&golden, &name).unwrap());
            assert!(error <= 1e-6, "{name}: {error:e}");
        }
        let ids = load_tensor(&golden, "input_ids").unwrap().narrow(0, 0, 1);
        let found = no_grad(|| rows(&logits(&load(&out), &ids)));
        let error = furthest(&found, &load_tensor(&golden, "logits").unwrap());
        println!("{numbers}: {error:.1e}");
        assert!(error <= 1e-4, "{numbers}: {error:e}");
    }
}

/// Merged, and for the servers that load them, the same function as base and adapter apart.
#[test]
fn every_kind_of_adapter_keeps_its_function() {
    for (base, name) in KINDS {
        let (base, name) = (fixture(base), fixture(name));
        let ids = Tensor::from_slice(&[5i64, 6, 80, 200, 7, 9, 300, 11, 12, 499, 3, 77]).view([1, 12]);
        let of = |model: Model| no_grad(|| logits(&model, &ids));
        let apart = of(load(&base).with_adapter(adapter(&base, &name)));
        assert!(furthest(&apart, &of(load(&base))) > 1e-2, "the adapter adds nothing");
        let dir = tempfile::tempdir().unwrap();
        let out = |target: &str| dir.path().join(target);
        exported(&base, &name, ExportTarget::Merged, &out("merged")).unwrap();
        exported(&base, &name, ExportTarget::Peft, &out("peft")).unwrap();
        let mut differences = vec![furthest(&of(load(&out("merged"))), &apart)];
        differences.push(furthest(&of(load(&base).with_adapter(adapter(&base, &out("peft")))), &apart));
        for (target, place) in [(ExportTarget::Vllm, "vllm"), (GGUF_ADAPTER, "gguf")] {
            match exported(&base, &name, target, &out(place)) {
                // What is in such a file, `gguf_written.rs` reads.
                Ok(_) if target == GGUF_ADAPTER => assert!(out(place).join("adapter.gguf").exists()),
                Ok(_) => {
                    let settings: Value =
                        serde_json::from_slice(&fs::read(out(place).join("adapter_config.json")).unwrap()).unwrap();
                    assert_eq!((&settings["r"], &settings["use_rslora"]), (&settings["lora_alpha"], &json!(false)));
                    assert_eq!((&settings["rank_pattern"], &settings["alpha_pattern"]), (&json!({}), &json!({})));
                    assert!(settings["r"] == 8 || settings["r"] == 1, "{}", settings["r"]);
                    differences.push(furthest(&of(load(&base).with_adapter(adapter(&base, &out(place)))), &apart));
                }
                Err(error) => {
                    let reasons = error.to_string();
                    assert!(
                        (reasons.contains("can't load this adapter: ") || reasons.contains("llama.cpp's names of tensors"))
                            && !out(place).exists(),
                        "{reasons}"
                    );
                    let name = name.display().to_string();
                    assert!(
                        ["dora", "bias", "mixtral", "moe", "gpt-oss", "lmhead", "embed", "norms"]
                            .iter()
                            .any(|kind| name.contains(kind)),
                        "{name}: {reasons}"
                    );
                }
            }
        }
        println!("{}: {differences:?}", name.display());
        assert!(differences.iter().all(|difference| *difference <= 5e-5), "{}: {differences:?}", name.display());
    }
}

/// A bias of B needs a bias of the linear to go to.
#[test]
fn what_has_no_place_in_the_weights_is_refused() {
    let (base, name) = (fixture("model-qwen2"), fixture("families/adapter-qwen2-lorabias"));
    let dir = tempfile::tempdir().unwrap();
    let error = exported(&base, &name, ExportTarget::Merged, &dir.path().join("merged")).unwrap_err().to_string();
    assert!(error.contains("o_proj` can't be merged: B has a bias"), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// In bf16 and in two shards, with files beside the weights.
fn sharded(dir: &Path) -> PathBuf {
    let (from, base) = (fixture("model-qwen2"), dir.join("base"));
    fs::create_dir(&base).unwrap();
    let all = load_tensors(&TensorFile::open(&from.join("model.safetensors")).unwrap()).unwrap();
    let all: Vec<_> = all.into_iter().map(|(name, tensor)| (name, tensor.to_kind(Kind::BFloat16))).collect();
    let mut map = serde_json::Map::new();
    for (file, part) in [("model-00001-of-00002.safetensors", &all[..9]), ("model-00002-of-00002.safetensors", &all[9..])] {
        save_tensors(&base.join(file), part, &pt_metadata()).unwrap();
        map.extend(part.iter().map(|(name, _)| (name.clone(), json!(file))));
    }
    let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
    fs::write(base.join("model.safetensors.index.json"), index.to_string()).unwrap();
    fs::copy(from.join("config.json"), base.join("config.json")).unwrap();
    fs::write(base.join("generation_config.json"), "{\"eos_token_id\": [1, 2]}").unwrap();
    fs::write(base.join("chat_template.jinja"), "{{ messages }}").unwrap();
    base
}

#[test]
fn shards_dtypes_and_companions_are_those_of_the_base() {
    let dir = tempfile::tempdir().unwrap();
    let (base, out) = (sharded(dir.path()), dir.path().join("out"));
    let name = fixture("adapter-qwen2");
    exported(&base, &name, ExportTarget::Merged, &out).unwrap();
    for same in ["config.json", "generation_config.json", "chat_template.jinja"] {
        assert_eq!(fs::read(base.join(same)).unwrap(), fs::read(out.join(same)).unwrap(), "{same}");
    }
    let index: Value = serde_json::from_slice(&fs::read(out.join("model.safetensors.index.json")).unwrap()).unwrap();
    let theirs: Value = serde_json::from_slice(&fs::read(base.join("model.safetensors.index.json")).unwrap()).unwrap();
    assert_eq!(index["weight_map"], theirs["weight_map"]);
    let mut bytes = 0;
    for shard in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        let (before, after) = (tensors(&base.join(shard)), tensors(&out.join(shard)));
        assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
        for (name, tensor) in after {
            assert_eq!(tensor.kind(), Kind::BFloat16);
            assert_eq!(tensor == before[&name], !name.contains("_proj.weight"), "{name}");
            bytes += tensor.numel() * 2;
        }
    }
    assert_eq!(index["metadata"]["total_size"], bytes);
    // Rounded once: as near as bf16 can be to the sum in f32.
    let key = "model.layers.0.self_attn.q_proj.weight";
    let lora = tensors(&name.join("adapter_model.safetensors"));
    let of = |part: &str| &lora[&format!("base_model.model.model.layers.0.self_attn.q_proj.{part}.weight")];
    let find = |dir: &Path| tensors(&dir.join(index["weight_map"][key].as_str().unwrap()))[key].shallow_clone();
    let sum = find(&base).to_kind(Kind::Float) + of("lora_B").matmul(of("lora_A")) * 2.0;
    assert_eq!(find(&out), sum.to_kind(Kind::BFloat16));
    load(&out);
}

#[test]
fn an_export_is_whole_or_nothing_and_overwrites_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (base, out) = (sharded(dir.path()), dir.path().join("out"));
    let name = fixture("adapter-qwen2");
    let names = || fs::read_dir(dir.path()).unwrap().count();
    let calls = std::cell::Cell::new(0);
    let should_continue = || {
        calls.set(calls.get() + 1);
        calls.get() < 12
    };
    let error = export(&trained(&base, &name), ExportTarget::Merged, &out, &should_continue).unwrap_err();
    assert!(error.to_string().contains("interrupted"), "{error}");
    assert_eq!((names(), calls.get()), (1, 12));
    // An empty directory may be there, another may not.
    fs::create_dir(&out).unwrap();
    exported(&base, &name, ExportTarget::Peft, &out).unwrap();
    let error = exported(&base, &name, ExportTarget::Peft, &out).unwrap_err();
    assert_eq!(error.to_string(), format!("`{}` exists and is not empty", out.display()));
    assert_eq!(names(), 2);
    assert_eq!(checkpoint::holds(&out), Some(TrainedWeights::Adapter));
}

/// What is trained in full takes its place; of a matrix that was two things at once it makes two.
#[test]
fn modules_in_full_take_their_place() {
    let (base, dir) = (fixture("model-qwen2"), tempfile::tempdir().unwrap());
    let stored = tensors(&base.join("model.safetensors"));
    for (name, trained, other) in [
        ("lmhead", "lm_head.weight", "model.embed_tokens.weight"),
        ("loralmhead", "lm_head.weight", "model.embed_tokens.weight"),
        ("loraembed", "model.embed_tokens.weight", "lm_head.weight"),
    ] {
        let out = dir.path().join(name);
        exported(&base, &fixture(&format!("families/adapter-qwen2-{name}")), ExportTarget::Merged, &out).unwrap();
        let written = tensors(&out.join("model.safetensors"));
        let was = &stored["model.embed_tokens.weight"];
        assert!(written[other] == *was && written[trained] != *was && !load(&out).config().tie_word_embeddings, "{name}");
    }
}

/// A classifier of sequences, as its base with the adapter apart.
#[test]
fn a_merged_classifier_is_one() {
    let (base, name, dir) = (fixture("model-qwen2"), fixture("families/adapter-qwen2-seqcls"), tempfile::tempdir().unwrap());
    let apart = {
        let model = load(&base).with_classes(Some(4));
        let adapter = Adapter::load_peft(&name, model.config(), Kind::Float, Device::Cpu).unwrap();
        model.with_adapter(adapter)
    };
    let ids = Tensor::from_slice(&[5i64, 6, 80, 200, 7]).view([1, 5]);
    exported(&base, &name, ExportTarget::Merged, &dir.path().join("merged")).unwrap();
    let merged = load(&dir.path().join("merged"));
    assert_eq!((merged.config().num_classes, merged.config().has_score), (Some(4), true));
    let [before, after] = [&apart, &merged].map(|model| no_grad(|| logits(model, &ids)));
    assert_eq!(before.size(), [1, 5, 4]);
    assert!(furthest(&before, &after) <= 5e-5);
    for target in [ExportTarget::Vllm, GGUF_ADAPTER] {
        let error = exported(&base, &name, target, &dir.path().join("other")).unwrap_err();
        assert!(error.to_string().contains("can't load this adapter: "), "{error}");
    }
    exported(&base, &name, ExportTarget::Peft, &dir.path().join("peft")).unwrap();

    // An output projection of the base's own is left out, with the file that has it alone: a classifier has none.
    let untied = dir.path().join("untied");
    fs::create_dir(&untied).unwrap();
    let output = vec![("lm_head.weight".to_owned(), Tensor::zeros([512, 64], (Kind::Float, Device::Cpu)))];
    let mut map = serde_json::Map::new();
    let rest = tensors(&base.join("model.safetensors")).into_iter().collect();
    for (file, part) in [("a.safetensors", rest), ("b.safetensors", output)] {
        save_tensors(&untied.join(file), &part, &pt_metadata()).unwrap();
        map.extend(part.into_iter().map(|(name, _)| (name, json!(file))));
    }
    fs::write(untied.join("model.safetensors.index.json"), json!({"weight_map": map}).to_string()).unwrap();
    let config = fs::read_to_string(base.join("config.json")).unwrap();
    let config = config.replace("\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
    fs::write(untied.join("config.json"), config).unwrap();
    exported(&untied, &name, ExportTarget::Merged, &dir.path().join("of-untied")).unwrap();
    assert!(!tensors(&dir.path().join("of-untied/model.safetensors")).contains_key("lm_head.weight"));
    let merged = load(&dir.path().join("of-untied"));
    assert!(furthest(&no_grad(|| logits(&merged, &ids)), &before) <= 5e-5);
}
