//! What was trained, written for other programs.

use insta::assert_snapshot;
use serde_json::json;

use super::place::Place;

/// A finished run of three steps, which validates.
fn trained() -> Place {
    let place = Place::new();
    place.finetune(&["data.validation_fraction=0.34"]).done();
    place
}

fn scores(place: &Place, arguments: &[&str]) -> serde_json::Value {
    let said = place.run(&[&["evaluate", "--device", "cpu", "--format", "json"][..], arguments].concat()).done();
    serde_json::from_str::<serde_json::Value>(&said.out).unwrap()["scores"]["overall"].take()
}

#[test]
fn a_merged_run_scores_as_the_run() {
    let place = trained();
    let said = place.run(&["export", "run", "--for", "merged"]).done();
    assert_eq!(said.out, "exported: run/export-merged\n");
    let own = scores(&place, &["run"]);
    let merged = scores(&place, &["--base", "run/export-merged", "--recipe", "run/recipe.resolved.toml"]);
    let difference = own["loss"].as_f64().unwrap() - merged["loss"].as_f64().unwrap();
    assert!(difference.abs() < 1e-5 && own["samples"] == merged["samples"], "{own} {merged}");
    let card = String::from_utf8(place.read("run/export-merged/README.md")).unwrap();
    for line in
        ["library_name: transformers", "| steps ", " 4, 2 |", " h2o |", " 32 |", "validation loss", "## Recipe", "seed = 1"]
    {
        assert!(card.contains(line), "{line} in:\n{card}");
    }
    let data = place.path("train.jsonl");
    assert!(card.contains("train = \"train.jsonl\"") && !card.contains(data.to_str().unwrap()), "{card}");
    // A run goes on beside its exports, and a checkpoint of its own choice is exported beside them.
    place.run(&["resume", "run", "--device", "cpu", "--set", "train.max_steps=4", "--set", "train.epochs=2"]).done();
    place.run(&["export", "run", "--for", "merged", "--out", "whole"]).done();
    place.run(&["export", "run/step-000001", "--for", "vllm", "--out", "served"]).done();
    let card = String::from_utf8(place.read("served/README.md")).unwrap();
    assert!(card.contains("library_name: peft") && card.contains("--enable-lora"), "{card}");
}

#[test]
fn what_a_server_does_not_load() {
    let place = Place::new();
    let set = ["lora.use_dora=true", "train.max_steps=1"];
    let words = place.check(&set).done().out;
    assert!(words.contains("DoRA r 4 alpha"), "{words}");
    place.finetune(&set).done();
    let words = place.run(&["inspect", "run"]).done().out;
    assert!(words.lines().any(|line| line.starts_with("| adapter ") && line.contains("| DoRA ")), "{words}");
    assert_snapshot!(place.run(&["export", "run", "--for", "vllm"]).refused(2), @r"
    error: vLLM can't load this adapter: it says that it does not support DoRA

    hint: use `--for merged`: the server then loads a model like its base
    ");
    assert!(!place.names("run").iter().any(|name| name.starts_with("export")), "{:?}", place.names("run"));
    place.run(&["export", "run", "--for", "peft", "--out", "peft"]).done();
    let card = String::from_utf8(place.read("peft/README.md")).unwrap();
    assert!(card.contains("A DoRA adapter for"), "{card}");
}

#[test]
fn places_and_bases_that_do_not_fit() {
    let place = Place::new();
    place.write("note.txt", "");
    assert_snapshot!(place.run(&["export", "adapter", "--for", "peft", "--out", "model", "--base", "model"]).refused(2), @r"
    error: `model` exists and is not empty

    hint: choose another `--out`, or empty the directory
    ");
    place.edit_json("adapter/adapter_config.json", json!({"base_model_name_or_path": "elsewhere"}));
    assert_snapshot!(place.run(&["export", "adapter", "--for", "peft"]).refused(2), @r"
    error: the base model of `adapter` is not known: there is no model in `elsewhere`

    hint: say where it is with `--base DIR`
    ");
    place.finetune(&["train.max_steps=1"]).done();
    place.edit_json("model/config.json", json!({"rms_norm_eps": 0.5}));
    assert_snapshot!(place.run(&["export", "run", "--for", "merged"]).refused(3), @r"
    error: `<dir>/model` is not the model that `run/final` was trained on

    hint: restore the model, or say where the right one is with `--base DIR`
    ");
}

/// It is part of the recipe, and so of everything that is done with a run.
#[test]
fn positions_scaled_by_the_length() {
    let place = Place::new();
    let scaling = "model.rope_scaling={ rope_type = \"dynamic_yarn\", original_max_position_embeddings = 16 }";
    let words = place.check(&[scaling]).done();
    assert!(words.out.contains("yarn by the length of a sequence beyond 16 tokens"), "{}", words.out);
    place.on_cpu("verify", &[scaling]).done();
    place.finetune(&[scaling, "data.validation_fraction=0.34"]).done();
    let own = scores(&place, &["run"]);
    let said = place.run(&["export", "run", "--for", "merged"]).done();
    assert!(said.err.contains("which Transformers refuses"), "{}", said.err);
    // The model has it, whatever a recipe says.
    let merged =
        scores(&place, &["--base", "run/export-merged", "--recipe", "recipe.toml", "--set", "data.validation_fraction=0.34"]);
    let difference = own["loss"].as_f64().unwrap() - merged["loss"].as_f64().unwrap();
    assert!(difference.abs() < 1e-5, "{own} {merged}");
    let plain = scores(&place, &["--base", "model", "--recipe", "recipe.toml", "--set", "data.validation_fraction=0.34"]);
    assert!((own["loss"].as_f64().unwrap() - plain["loss"].as_f64().unwrap()).abs() > 1e-3, "{own} {plain}");
    assert_snapshot!(place.run(&["export", "run", "--for", "vllm"]).refused(2), @r"
    error: vLLM has no rotary embeddings of the kind `dynamic_yarn`, with which this was trained

    hint: use it with kvtune, or train without `model.rope_scaling`
    ");
}

/// A kind that other programs have is proved, trained, and written for them.
#[test]
fn positions_scaled_as_in_a_model_card() {
    let place = Place::new();
    place.edit_json("model/config.json", json!({"max_position_embeddings": 32}));
    let too_long = "data.max_seq_length=64";
    assert_snapshot!(place.check(&[too_long]).refused(2), @r#"
    error: `data.max_seq_length` is 64, and the model has 32 positions

    hint: lower `data.max_seq_length` or leave it out, scale the rotary embeddings with `model.rope_scaling = { rope_type = "yarn", factor = 2.0, original_max_position_embeddings = 32 }`, or take a model with more positions
    "#);
    assert!(place.finetune(&[too_long]).refused(2).contains("has 32 positions"));
    let tokens = place.run(&["plan", "--recipe", "recipe.toml", "--device", "cpu", "--tokens", "64"]).refused(2);
    assert!(tokens.contains("`model.rope_scaling = { rope_type = \"yarn\", factor = 2.0"), "{tokens}");
    let scaling = "model.rope_scaling={ type = \"yarn\", factor = 2.0, beta_fast = 16.0 }";
    let words = place.check(&[scaling, too_long]).done();
    assert!(words.out.contains("yarn × 2 over 32 tokens") && words.out.contains("40 tokens in"), "{}", words.out);
    assert!(
        place.check(&["model.rope_scaling={ type = \"yarn\" }"]).refused(2).contains("`model.rope_scaling.factor` is missing")
    );
    place.on_cpu("verify", &[scaling, too_long]).done();
    place.finetune(&[scaling, "data.validation_fraction=0.34"]).done();
    let own = scores(&place, &["run"]);
    assert!(
        place.run(&["export", "run", "--for", "peft"]).done().err.contains(r#""rope_scaling": {"beta_fast":16.0,"factor":2.0"#)
    );
    assert!(!place.run(&["export", "run", "--for", "merged"]).done().err.contains("rope"));
    let config: serde_json::Value = serde_json::from_slice(&place.read("run/export-merged/config.json")).unwrap();
    let written = config.get("rope_parameters").or(config.get("rope_scaling")).unwrap();
    assert_eq!((&written["rope_type"], &written["factor"]), (&json!("yarn"), &json!(2.0)), "{config}");
    // The model has it, whatever a recipe says.
    let merged =
        scores(&place, &["--base", "run/export-merged", "--recipe", "recipe.toml", "--set", "data.validation_fraction=0.34"]);
    assert!((own["loss"].as_f64().unwrap() - merged["loss"].as_f64().unwrap()).abs() < 1e-5, "{own} {merged}");
}

/// Beside every checkpoint and export, and tested by running it.
#[test]
fn the_policy_file_conforms_and_tells_where_not() {
    let place = trained();
    place.run(&["export", "run", "--for", "merged"]).done();
    place.run(&["export", "run", "--for", "vllm"]).done();
    let conformance = |dir: &str| place.run(&["verify", "--device", "cpu", "--conformance", dir]);
    for dir in ["run/final", "run/step-000001", "run/export-merged", "run/export-vllm"] {
        assert!(conformance(dir).done().out.starts_with("conforms: "), "{dir}");
    }
    let file: serde_json::Value = serde_json::from_slice(&place.read("run/final/kv_policy.json")).unwrap();
    assert_eq!((&file["policy"], &file["cache_lengths"]), (&json!("h2o"), &json!([[32, 32], [32, 32], [32, 32]])));
    let schema: serde_json::Value = serde_json::from_str(include_str!("../../docs/reference/kv-policy.schema.json")).unwrap();
    let keys =
        |object: &serde_json::Value| object.as_object().unwrap().keys().cloned().collect::<std::collections::BTreeSet<_>>();
    assert_eq!(keys(&schema["properties"]), keys(&file));
    assert_eq!(keys(&schema["properties"]["conformance"]["properties"]), keys(&file["conformance"]));
    assert_eq!((&file["chunk_size"], &file["positions"], &file["buffer"]), (&json!(8), &json!("absolute"), &json!("plain")));
    let left = file["conformance"]["left"][0][0].as_array().unwrap();
    assert!(left.len() == 49 && left.iter().filter(|query| query.is_u64()).count() == 33, "{left:?}");
    let corrupt = |changes| {
        place.edit_json("run/export-vllm/kv_policy.json", changes);
        conformance("run/export-vllm")
    };
    let mut recorded = file["conformance"].clone();
    let token = (0..left.len()).find(|&token| left[token].is_u64()).unwrap();
    recorded["left"][0][0][token] = json!(null);
    let error = corrupt(json!({"conformance": recorded})).refused(1);
    assert!(error.contains(&format!("layer 0, KV head 0, token {token} leaves before query")), "{error}");
    assert!(error.contains(", recorded: stays"), "{error}");
    let good = file["conformance"].clone();
    for (changes, expected, code) in [
        (json!({"conformance": good, "unknown": 1}), "unknown field `unknown`", 3),
        (json!({"unknown": null, "version": 2}), "of version 2, expected", 3),
        (json!({"version": 1, "positions": "shifted"}), "`positions` in", 3),
        (json!({"positions": "absolute", "windows": [4, null, null]}), "`windows` in", 3),
        (json!({"windows": file["windows"], "base_hash": "0"}), "`base_hash` in", 3),
        (json!({"base_hash": file["base_hash"], "policy": "h3o"}), "unknown value `h3o`", 2),
        (json!({"policy": {"h2o": {"grac": 1}}}), "unknown key `grac` in `[kv_cache.policy.h2o]`", 2),
    ] {
        let error = corrupt(changes).refused(code);
        assert!(error.contains(expected), "{expected} in {error}");
    }
    let error = place.run(&["verify", "--device", "cpu", "--conformance", "adapter"]).refused(3);
    assert!(error.contains("there is no `kv_policy.json` in `adapter`"), "{error}");
    // An adapter goes with the positions that it was trained with.
    let other = "model.rope_scaling={ rope_type = \"dynamic_yarn\", original_max_position_embeddings = 16 }";
    let error = place.run(&["evaluate", "run", "--device", "cpu", "--split", "train", "--set", other]).refused(2);
    assert!(error.contains("was trained with other positions: without `model.rope_scaling`"), "{error}");
}
