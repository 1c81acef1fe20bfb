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
    // A run goes on beside its exports, and a checkpoint of its own choice is exported beside them.
    place.run(&["resume", "run", "--device", "cpu", "--set", "train.max_steps=4", "--set", "train.epochs=2"]).done();
    place.run(&["export", "run/step-000001", "--for", "vllm", "--out", "served"]).done();
    let card = String::from_utf8(place.read("served/README.md")).unwrap();
    assert!(card.contains("library_name: peft") && card.contains("--enable-lora"), "{card}");
}

#[test]
fn what_a_server_does_not_load() {
    let place = Place::new();
    place.finetune(&["lora.use_dora=true", "train.max_steps=1"]).done();
    assert_snapshot!(place.run(&["export", "run", "--for", "vllm"]).refused(2), @r"
    error: vLLM can't load this adapter: it says that it does not support DoRA

    hint: use `--for merged`: the server then loads a model like its base
    ");
    assert!(!place.names("run").iter().any(|name| name.starts_with("export")), "{:?}", place.names("run"));
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
