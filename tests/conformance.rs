//! The policy file of every policy and of models of every kind: written, read and conformed to; and every eviction in it counts.

use std::path::Path;

use kvtune::export::{KV_POLICY, PolicyFile, PolicyTrial};
use kvtune::model::Model;
use kvtune::recipe::Recipe;
use tch::Device;

use crate::support;
use crate::support::policies::registered;

const CPU: Device = Device::Cpu;

/// A recipe for a fixture, with a `[kv_cache]` of its own.
fn recipe(model: &str, cache: &str) -> Recipe {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(model);
    let text =
        format!("[model]\npath = \"{}\"\n[data]\nformat = \"tokens\"\ntrain = \"none\"\n[kv_cache]\n{cache}\n", path.display());
    Recipe::parse(text, Path::new("/nowhere/r.toml"), &[]).unwrap().recipe
}

fn written(recipe: &Recipe, dir: &Path) -> (Model, PolicyFile) {
    support::on_one_thread();
    let mut model = Model::load(&recipe.model, recipe.model.dtype, CPU).unwrap();
    if ["learned", "triattention"].contains(&&*recipe.kv_cache.policy.name) {
        model.set_gates(support::gates(&model));
    }
    let trial = PolicyTrial::smallest(model.config(), &recipe.kv_cache, &recipe.grad).unwrap();
    let file = PolicyFile::record(recipe, &model, "hash", &trial).unwrap();
    std::fs::write(dir.join(KV_POLICY), kvtune::files::to_json(&file)).unwrap();
    (model, file)
}

#[test]
fn every_policy_is_recorded_and_conforms() {
    for (at, (name, params)) in registered().into_iter().enumerate() {
        let buffer = if name.starts_with("qh2o") { "buffer = \"int8\"" } else { "" };
        let policy = format!("[kv_cache.policy.{name}]\n{params}");
        let dir = tempfile::tempdir().unwrap();
        let recipe = recipe("model-qwen2", &format!("cache_length = [96, 64, 128]\nchunk_size = 20\n{buffer}\n{policy}"));
        let (model, file) = written(&recipe, dir.path());
        let read = PolicyFile::read(dir.path()).unwrap();
        assert_eq!(read, file, "{name}");
        let left = read.check(dir.path(), &model).unwrap();
        println!("{name}: {left} of {} tokens, {} slots", file.conformance.prompt.len(), file.conformance.cache_length);
        assert_eq!(left == 0, name == "dense", "{name}");
        assert_eq!(file.cache_lengths, [[96; 2], [64; 2], [128; 2]]);
        assert!(file.conformance.cache_length <= 128 && file.conformance.prompt.len() <= 400, "{name}");
        // Whichever layer, head and token is another, it is seen; of a policy one of two.
        let (layer, token) = [(0, 3), (2, file.conformance.prompt.len() - 1)][at % 2];
        let mut other = read.clone();
        let query = &mut other.conformance.left[layer][1][token];
        *query = if query.is_none() { Some(token + 1) } else { None };
        let error = other.check(dir.path(), &model).unwrap_err();
        assert!(error.to_string().contains(&format!("`: layer {layer}, KV head 1, token {token} ")), "{name}: {error}");
    }
}

/// Windows, experts, two rotations, another scaling.
#[test]
fn models_of_other_builds_conform() {
    for model in ["qwen2-swa", "mixtral", "gemma3", "phi3", "smollm3", "llama31"] {
        let dir = tempfile::tempdir().unwrap();
        let recipe = recipe(&format!("families/model-{model}"), "policy = \"h2o\"\ncache_length = 64\nchunk_size = 8");
        let (model, file) = written(&recipe, dir.path());
        let read = PolicyFile::read(dir.path()).unwrap();
        assert!(read == file && read.check(dir.path(), &model).unwrap() > 0, "{model:?}");
        for (window, heads) in read.windows.iter().zip(&read.conformance.left) {
            assert_eq!(window.is_some(), heads.is_empty());
        }
    }
}

#[test]
fn what_is_trained_as_in_decoding_conforms_by_its_prompt() {
    let (dir, cache) = (tempfile::tempdir().unwrap(), "policy = \"h2o\"\ncache_length = 32\nchunk_size = 8\ndecode_block = 4");
    let (model, file) =
        written(&recipe("model-qwen2", &format!("{cache}\n[grad]\nsingle_tokens_for_targets = true")), dir.path());
    assert_eq!(file.decode_block, 4);
    assert!(PolicyFile::read(dir.path()).unwrap().check(dir.path(), &model).unwrap() > 0);
}

#[test]
fn a_file_of_another_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (_, file) = written(&recipe("model-qwen2", "cache_length = 32\nchunk_size = 8"), dir.path());
    for (other, key) in [("mixtral", "cache_lengths"), ("qwen2-swa", "windows"), ("qwen2-yarn", "cache_lengths")] {
        let other = recipe(&format!("families/model-{other}"), "cache_length = 32\nchunk_size = 8");
        let model = Model::load(&other.model, other.model.dtype, CPU).unwrap();
        let error = file.check(dir.path(), &model).unwrap_err();
        assert!(error.to_string().starts_with(&format!("`{key}` in `")), "{error}");
    }
}
