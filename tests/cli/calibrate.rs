//! `calibrate`, and what is made of it.

use serde_json::{Value, json};

use super::place::Place;

/// A row that is long enough to tell what is needed later, of which the last tokens are predicted.
fn row(index: usize, targets: usize) -> String {
    let ids: Vec<i64> = (0..901).map(|at| ((at * at + 7 * at * (index + 1) + index) % 40) as i64).collect();
    let labels: Vec<i64> = ids.iter().enumerate().map(|(at, &id)| if at + targets < 901 { -100 } else { id }).collect();
    json!({ "input_ids": ids, "labels": labels }).to_string() + "\n"
}

fn place() -> Place {
    let place = Place::new();
    place.edit_json("model/config.json", json!({ "max_position_embeddings": 1024 }));
    place.write("train.jsonl", (0..2).map(|index| row(index, 901)).collect::<String>());
    place
}

#[test]
fn gates_and_slots_are_found_and_a_policy_goes_by_them() {
    let place = place();
    let calibrate = ["calibrate", "model", "--recipe", "recipe.toml", "--split", "train", "--out", "gates", "--device", "cpu"];
    let said = place.run(&[&calibrate[..], &["--cache-length", "64,96", "--format", "json"]].concat()).done();
    let found: Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!(found["samples"], 2);
    assert_eq!(place.names("gates"), ["kv_gates.safetensors"]);
    let lengths: Vec<Vec<usize>> = serde_json::from_value(found["cache_lengths"].clone()).unwrap();
    for (lengths, mean) in lengths.iter().zip([64, 96]) {
        assert_eq!(lengths.iter().sum::<usize>(), mean * lengths.len(), "{lengths:?}");
    }
    let learned = [
        "kv_cache.policy=learned".to_owned(),
        "kv_cache.gates=gates".to_owned(),
        format!("kv_cache.cache_length={:?}", lengths[1]),
    ];
    let learned: Vec<&str> = learned.iter().map(String::as_str).collect();
    place.finetune(&[&learned[..], &["train.micro_batch_size=1", "train.max_steps=1"]].concat()).done();
    assert!(place.names("run/final").contains(&"kv_gates.safetensors".to_owned()));
    // What queries are like is beside the gates, and asked for where it is not.
    let evaluate =
        ["evaluate", "run", "--policy", "learned,triattention", "--split", "train", "--device", "cpu", "--format", "json"];
    assert_eq!(place.run(&evaluate).done().out.lines().count(), 2);
    let train = ["finetune-lora", "recipe.toml", "--out", "other", "--device", "cpu", "--set", "kv_cache.policy=triattention"];
    let error = place.run(&train).refused(2);
    assert!(error.contains("needs query statistics, and the model has none"), "{error}");
    // Taken anew, of what was trained, with the mean of its slots.
    let anew = place.run(&["calibrate", "run", "--split", "train", "--limit", "1", "--out", "anew", "--device", "cpu"]).done();
    let lines = "[kv_cache]\npolicy.learned = { grace_period = 0.375 }\ngates = \"<dir>/anew\"\ncache_length = [";
    assert!(anew.out.contains(lines) && anew.out.ends_with("    # 96 on average\n"), "{}", anew.out);
    assert!(anew.err.contains("has gates of its own, which go before `kv_cache.gates`"), "{}", anew.err);
    // A recipe may name what is still to be made.
    place.edit_recipe("policy = \"h2o\"", "policy = \"learned\"\ngates = \"not-made-yet\"");
    place.write("train.jsonl", (0..2).map(|index| row(index, 20)).collect::<String>());
    let answers = place.run(&[&calibrate[..7], &["first", "--limit", "1", "--device", "cpu"]].concat()).done();
    assert!(answers.out.contains("\npolicy.learned = { gate_alone = true }\n"), "{}", answers.out);
}

#[test]
fn what_can_not_be_calibrated_is_said_before_and_after() {
    let place = Place::new();
    let calibrate = ["calibrate", "model", "--recipe", "recipe.toml", "--split", "train", "--device", "cpu", "--out"];
    let error = place.run(&[&calibrate[..], &["model"]].concat()).refused(2);
    assert!(error.starts_with("error: `model` exists and is not empty\n"), "{error}");
    let error = place.run(&[&calibrate[..], &["gates", "--cache-length", "31"]].concat()).refused(2);
    assert!(
        error.starts_with("error: 31 slots can't be shared out over layers: each gets a multiple of 32, at least 32\n"),
        "{error}"
    );
    let error = place.run(&[&calibrate[..], &["gates"]].concat()).refused(3);
    assert!(error.contains("error: no sample has at least 896 tokens\n"), "{error}");
    assert!(!place.path("gates").exists());
    place.edit_json(
        "model/config.json",
        json!({"use_sliding_window": true, "sliding_window": 24, "max_window_layers": 0, "layer_types": null}),
    );
    let error = place.run(&[&calibrate[..], &["gates"]].concat()).refused(2);
    assert!(error.starts_with("error: all layers of the model have a sliding window"), "{error}");
}
