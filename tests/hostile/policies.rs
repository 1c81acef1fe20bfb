//! `kv_policy.json` with what no run has recorded: refused before anything is made of it.

use serde_json::{Value, json};

use super::case::{Case, hold};
use super::ground::Ground;

const GENERATE: &[&str] = &["generate", "model", "--adapter", "exported", "--prompt-tokens", "5,6", "--max-new-tokens", "2"];

/// The key by its place, and what stands there.
fn with(key: &'static str, value: Value) -> impl Fn(&Ground, &str) {
    move |ground, file| {
        let mut policy: Value = serde_json::from_slice(&ground.read(file)).unwrap();
        *policy.pointer_mut(&format!("/{}", key.replace('.', "/"))).unwrap_or(&mut Value::Null) = value.clone();
        if policy.get(key).is_none() && !key.contains('.') {
            policy[key] = value.clone();
        }
        ground.write(file, policy.to_string());
    }
}

/// An adapter outside of its run: the file alone says which cache it has.
fn exported(ground: &Ground) {
    ground.with_run();
    std::fs::create_dir(ground.path("exported")).unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors", "kv_policy.json"] {
        ground.write(&format!("exported/{name}"), ground.read(&format!("run/final/{name}")));
    }
}

fn damaged(key: &'static str, value: Value) -> Case {
    let shown: String = value.to_string().chars().take(40).collect();
    let change = with(key, value);
    let make = move |ground: &Ground| {
        exported(ground);
        change(ground, "exported/kv_policy.json");
    };
    Case::new(format!("{key} = {shown}"), make).run(GENERATE).or_code(2).says(&["kv_policy.json"])
}

#[test]
fn twenty_four_damages() {
    let huge = json!(1u64 << 62);
    let long: Vec<u32> = (0..1_000_000).map(|id| id % 500).collect();
    let cases = [
        damaged("sinks", json!([7, 7, 7])).says(&["`sinks`"]),
        damaged("sinks", json!([0])).says(&["`sinks`"]),
        damaged("grace", json!([9, 9, 9])).says(&["`grace`"]),
        damaged("grace", json!([])).says(&["`grace`"]),
        damaged("policy", json!({"h2o": {"sinks": 4}})).says(&["unknown key `sinks`"]),
        damaged("policy", json!("h3o")).says(&["h3o"]),
        damaged("policy", json!([1, 2])),
        damaged("unheard", json!(1)).says(&["unknown field `unheard`"]),
        damaged("conformance.cache_length", huge.clone()).says(&["`conformance.cache_length`", "1 to 32"]),
        damaged("conformance.cache_length", json!(0)).says(&["`conformance.cache_length`"]),
        damaged("conformance.chunk_size", huge.clone()).says(&["`conformance.chunk_size`", "1 to 8"]),
        damaged("conformance.prompt", json!(long)).says(&["`conformance.prompt`", "1000000 tokens"]),
        damaged("conformance.prompt", json!([5])).says(&["`conformance.prompt`"]),
        damaged("conformance.left", json!([])).says(&["`conformance.left`"]),
        damaged("conformance.left", json!([[[1], [1]]])).says(&["`conformance.left`"]),
        damaged("chunk_size", huge.clone()).instead_of("kv_policy.json", "`kv_cache.chunk_size`"),
        damaged("chunk_size", json!(0)),
        damaged("decode_block", huge.clone()),
        damaged("cache_lengths", json!([[1u64 << 62, 1u64 << 62], [32, 32], [32, 32]])),
        damaged("cache_lengths", json!([[32, 32]])),
        damaged("windows", json!([null])).says(&["`windows`"]),
        damaged("rope", json!([])).says(&["`rope`"]),
        damaged("base_hash", json!("blake3:00")).says(&["`base_hash`"]),
        damaged("positions", json!("shifted")).says(&["`positions`"]),
    ];
    assert_eq!(cases.len(), 24);
    hold(cases);
}

/// The test itself refuses them likewise.
#[test]
fn a_recording_that_none_made() {
    let of = |key: &'static str, value: Value| {
        let change = with(key, value);
        let make = move |ground: &Ground| {
            exported(ground);
            change(ground, "exported/kv_policy.json");
        };
        Case::new(format!("a recorded {key}"), make)
            .run(&["verify", "--conformance", "exported", "--base", "model"])
            .says(&["kv_policy.json", key.rsplit('.').next().unwrap()])
    };
    hold([of("conformance.cache_length", json!(1u64 << 62)), of("sinks", json!([7, 7, 7]))]);
}
