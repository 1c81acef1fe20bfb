//! What was trained, written for other programs.

use std::path::Path;

use insta::assert_snapshot;
use kvtune::files::TensorFile;
use kvtune::model::{GATE_TENSORS, Model};
use kvtune::recipe::Dtype;
use kvtune::store::{pt_metadata, save_tensors};
use serde_json::json;
use tch::Device;

use super::place::{Place, classified};
use crate::support::gates;

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
    assert!(said.out.starts_with("exported: run/export-merged\n\n"), "{}", said.out);
    let own = scores(&place, &["run"]);
    let merged = scores(&place, &["--base", "run/export-merged", "--recipe", "run/recipe.resolved.toml"]);
    let difference = own["loss"].as_f64().unwrap() - merged["loss"].as_f64().unwrap();
    assert!(difference.abs() < 1e-5 && own["samples"] == merged["samples"], "{own} {merged}");
    let card = String::from_utf8(place.read("run/export-merged/README.md")).unwrap();
    for line in
        ["library_name: \"transformers\"", "| steps ", " 4, 2 |", " h2o |", " 32 |", "validation loss", "## Recipe", "seed = 1"]
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
    assert!(card.contains("library_name: \"peft\"") && card.contains("--enable-lora"), "{card}");
}

/// Transformers shows them in place of `LABEL_0`.
#[test]
fn a_merged_classifier_has_the_names_of_its_classes() {
    let place = Place::new();
    place.write("train.jsonl", (0..4).map(classified).collect::<String>());
    let names = ["head.kind=seq_classification", "head.labels=[\"n\", \"e\", \"s\", \"w\"]", "train.max_steps=1"];
    place.finetune(&names).done();
    place.run(&["export", "run", "--for", "merged"]).done();
    let config: serde_json::Value = serde_json::from_slice(&place.read("run/export-merged/config.json")).unwrap();
    assert_eq!(config["id2label"], json!({"0": "n", "1": "e", "2": "s", "3": "w"}));
    assert_eq!(config["label2id"], json!({"n": 0, "e": 1, "s": 2, "w": 3}));
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
    let refused = place.run(&["export", "run", "--for", "gguf"]).refused(2);
    assert!(refused.contains("magnitudes of DoRA") && refused.contains("`convert_hf_to_gguf.py`"), "{refused}");
    assert!(!place.names("run").iter().any(|name| name.starts_with("export")), "{:?}", place.names("run"));
    place.run(&["export", "run", "--for", "peft", "--out", "peft"]).done();
    let card = String::from_utf8(place.read("peft/README.md")).unwrap();
    assert!(card.contains("A DoRA adapter for"), "{card}");
}

/// Gates go where the weights go, and every cache that is made of them evicts the same.
#[test]
fn gates_stay_with_what_was_trained_beside_them() {
    let place = Place::new();
    let mut model = Model::load(&place.path("model"), Dtype::F32, Device::Cpu).unwrap();
    model.set_gates(gates(&model));
    let tensors: Vec<_> = model.gates().collect();
    save_tensors(&place.path("gates.safetensors"), &tensors, &pt_metadata()).unwrap();
    let learned = "kv_cache.policy=learned";
    assert_snapshot!(place.finetune(&[learned]).refused(2), @r"
    error: the policy `learned` needs gates, and the model has none

    hint: make them with `kvtune calibrate` and name them with `kv_cache.gates`, or choose another policy
    ");
    for command in ["check", "plan"] {
        let ask = |set: &[&str]| place.run(&[&[command, "recipe.toml", "--device", "cpu", "--set", learned], set].concat());
        assert!(ask(&[]).refused(2).contains("needs gates"), "{command}");
        ask(&["--set", "kv_cache.gates=none-there"]).refused(3);
        ask(&["--set", "kv_cache.gates=gates.safetensors"]).done();
    }
    place.finetune(&[learned, "kv_cache.gates=gates.safetensors", "data.validation_fraction=0.34"]).done();
    // Gates beside an adapter are those of the run that goes on from it.
    place.run(&["check", "recipe.toml", "--device", "cpu", "--set", learned, "--set", "model.adapter=run/final"]).done();
    place.run(&["resume", "run", "--device", "cpu", "--set", "train.max_steps=4", "--set", "train.epochs=2"]).done();
    std::fs::remove_file(place.path("gates.safetensors")).unwrap();
    place.run(&["export", "run", "--for", "merged", "--out", "whole"]).done();
    place.run(&["export", "run", "--for", "peft", "--out", "peft"]).done();
    for dir in ["run/final", "whole", "peft"] {
        let gates = TensorFile::open(&place.path(dir).join(GATE_TENSORS)).unwrap();
        assert_eq!(gates.names().len(), tensors.len(), "{dir}");
        assert!(place.run(&["verify", "--device", "cpu", "--conformance", dir]).done().out.starts_with("conforms: "), "{dir}");
    }
    let own = scores(&place, &["run"]);
    let merged = scores(&place, &["--base", "whole", "--recipe", "run/recipe.resolved.toml"]);
    let difference = own["loss"].as_f64().unwrap() - merged["loss"].as_f64().unwrap();
    assert!(difference.abs() < 1e-5, "{own} {merged}");
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
    error: cannot find the base model of `adapter`: there is no model in `elsewhere`

    hint: name its directory, which has a `config.json`, with `--base DIR`
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

/// What the Hub reads of a card.
fn front_matter(place: &Place, name: &str) -> serde_json::Value {
    let card = String::from_utf8(place.read(name)).unwrap();
    let (head, _) = card.strip_prefix("---\n").unwrap().split_once("\n---\n").unwrap();
    serde_saphyr::from_str(head).unwrap()
}

#[test]
fn an_end_and_an_export_are_ready_for_the_hub() {
    let place = Place::new();
    place.edit_json("model/config.json", json!({"_name_or_path": "org/base"}));
    place.write("model/README.md", "---\nlicense: apache-2.0\nlanguage: en\n---\n# Base\n");
    place.write("own.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
    place.finetune(&["data.validation_fraction=0.34", "data.chat_template=own.jinja", "checkpoint.save_interval=9"]).done();
    let expected = [
        "MANIFEST.json",
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
        "kv_policy.json",
    ];
    let expected: Vec<&str> = expected.into_iter().chain(["state.json", "tokenizer.json", "tokenizer_config.json"]).collect();
    assert_eq!(place.names("run/final"), expected);
    assert_eq!(place.read("run/final/chat_template.jinja"), place.read("own.jinja"));
    let card = front_matter(&place, "run/final/README.md");
    for (key, value) in [
        ("base_model", json!("org/base")),
        ("library_name", json!("peft")),
        ("pipeline_tag", json!("text-generation")),
        ("license", json!("apache-2.0")),
        ("tags", json!(["kvtune", "lora"])),
    ] {
        assert_eq!(card[key], value, "{key}");
    }
    let own = &card["model-index"][0]["results"][0];
    assert_eq!((&own["dataset"]["name"], &own["metrics"][0]["type"]), (&json!("train.jsonl"), &json!("loss")));
    assert_eq!(own["metrics"][0]["args"], json!({"policy": "h2o", "cache_length": "32"}));
    let text = String::from_utf8(place.read("run/final/README.md")).unwrap();
    assert!(!text.contains(place.path("").to_str().unwrap()), "{text}");
    // What the optimiser holds stays in a checkpoint of the step, from which the run goes on; a card may be written on.
    assert!(place.names("run/step-000002").contains(&"optimizer.safetensors".to_owned()));
    place.write("run/final/README.md", "ours");
    let more = ["resume", "run", "--device", "cpu", "--set", "train.max_steps=4", "--set", "train.epochs=2"];
    let said = place.run(&more).done();
    assert!(said.err.contains("resuming after step 2 from `run/final`"), "{}", said.err);
    // Without that checkpoint the end is used as before, and there is nothing to go on from.
    std::fs::remove_dir_all(place.path("run/step-000004")).unwrap();
    let said = place.run(&["resume", "run", "--device", "cpu"]).done();
    assert!(said.err.contains("nothing to do"), "{}", said.err);
    let error =
        place.run(&["resume", "run", "--device", "cpu", "--set", "train.max_steps=6", "--set", "train.epochs=3"]).refused(3);
    assert!(
        error.starts_with("error: `run/step-000004` is damaged: `run/final` goes on with the optimiser's state in it"),
        "{error}"
    );

    let printed = place.run(&["evaluate", "run", "--policy", "h2o,lastrec", "--device", "cpu", "--format", "json"]).done().out;
    place.write("scores.json", printed);
    let said = place.run(&["export", "run", "--for", "peft", "--scores", "scores.json"]).done();
    for line in ["PeftModel.from_pretrained(base, \"run/export-peft\")", "AutoTokenizer.from_pretrained(\"run/export-peft\")"] {
        assert!(said.out.starts_with("exported: run/export-peft\n\n") && said.out.contains(line), "{}", said.out);
    }
    assert!(place.names("run/export-peft").contains(&"chat_template.jinja".to_owned()));
    let card = front_matter(&place, "run/export-peft/README.md");
    let results = card["model-index"][0]["results"].as_array().unwrap();
    let policies: Vec<_> = results.iter().map(|result| result["metrics"][0]["args"]["policy"].as_str().unwrap()).collect();
    assert_eq!(policies, ["h2o", "lastrec"]);
    let said = place.run(&["export", "run", "--for", "merged"]).done();
    assert!(said.out.contains("vllm serve run/export-merged") && said.out.contains("convert_hf_to_gguf.py"), "{}", said.out);
}

/// Hugging Face's cache has links into its blobs.
#[test]
fn links_of_a_model_directory() {
    let place = trained();
    place.write("secret", "of the user");
    std::os::unix::fs::symlink("../secret", place.path("model/chat_template.jinja")).unwrap();
    for target in ["merged", "peft"] {
        let error = place.run(&["export", "run", "--for", target]).refused(3);
        assert!(error.contains("`<dir>/model/chat_template.jinja` is a link to `<dir>/secret`"), "{error}");
    }
    let said = place.run(&["finetune-lora", "--recipe", "recipe.toml", "--out", "again"]).done();
    assert!(said.err.contains("warning: `final` will lack `chat_template.jinja`"), "{}", said.err);
    assert!(!place.names("again/final").contains(&"chat_template.jinja".to_owned()));
    std::fs::remove_file(place.path("model/chat_template.jinja")).unwrap();

    let cached = place.path("hub/models--org--base");
    std::fs::create_dir_all(cached.join("snapshots/0123")).unwrap();
    std::fs::create_dir_all(cached.join("blobs")).unwrap();
    for name in place.names("model") {
        std::fs::rename(place.path("model").join(&name), cached.join("blobs").join(format!("b-{name}"))).unwrap();
        std::os::unix::fs::symlink(format!("../../blobs/b-{name}"), cached.join("snapshots/0123").join(&name)).unwrap();
    }
    let base = "hub/models--org--base/snapshots/0123";
    place.run(&["export", "run", "--for", "merged", "--base", base]).done();
    assert!(!std::fs::symlink_metadata(place.path("run/export-merged/tokenizer.json")).unwrap().is_symlink());
    assert_eq!(front_matter(&place, "run/export-merged/README.md")["base_model"], json!("org/base"));
}

/// What a killed export has left of the same place goes with the next, unless its writer is at work.
#[test]
fn what_a_killed_export_leaves() {
    let place = trained();
    let killed =
        place.command(&["export", "run", "--for", "merged"]).env("KVTUNE_FAILPOINT", "file.rename=kill:1").output().unwrap();
    assert!(!killed.status.success());
    let left = || place.names("run").into_iter().filter(|name| name.contains("export-merged.tmp-")).count();
    assert_eq!(left(), 1);
    place.run(&["export", "run", "--for", "merged"]).done();
    assert_eq!(left(), 0);
    let init = ["init-model", "--config", "model/config.json", "--out", "new"];
    let killed = place.command(&init).env("KVTUNE_FAILPOINT", "file.rename=kill:2").output().unwrap();
    assert!(!killed.status.success() && !place.path("new").exists());
    place.run(&init).done();
    assert!(place.names(".").iter().all(|name| !name.contains(".tmp-")), "{:?}", place.names("."));
}

/// Bases that stay packed: a run on one resumes, and merged into the unpacked weights it scores as it did.
#[test]
fn a_run_on_packed_weights_is_resumed_and_merged_into_unpacked_ones() {
    let quantised = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised");
    for model in ["model-gguf-llama-q4_0/model.gguf", "model-bnb-nf4-dq"] {
        let place = Place::new();
        let path = quantised.join(model);
        let path = format!("model.path=\"{}\"", path.display());
        let settings = [&path[..], "data.format=\"tokens\"", "data.validation_fraction=0.34"];
        let checked = place.check(&settings).done();
        assert!(checked.out.contains("packed weights"), "{}", checked.out);
        place.finetune(&settings).done();
        let resume = ["resume", "run", "--device", "cpu", "--set", "train.max_steps=4", "--set", "train.epochs=2"];
        place.run(&resume).done();
        place.run(&["export", "run", "--for", "merged", "--out", "merged"]).done();
        let own = scores(&place, &["run"]);
        let merged = scores(&place, &["--base", "merged", "--recipe", "run/recipe.resolved.toml"]);
        let difference = own["loss"].as_f64().unwrap() - merged["loss"].as_f64().unwrap();
        assert!(difference.abs() < 1e-5, "{model}: {own} {merged}");
        let adapter = place.run(&["export", "run", "--for", "ollama"]).done().out;
        assert!(adapter.contains("ollama create trained --file run/export-ollama/Modelfile"), "{adapter}");
        let modelfile = String::from_utf8(place.read("run/export-ollama/Modelfile")).unwrap();
        assert!(
            modelfile.starts_with(if model.contains("gguf") { "FROM /" } else { "FROM ./base.gguf\n" })
                && modelfile.contains("\nADAPTER ./adapter.gguf\nPARAMETER num_ctx "),
            "{modelfile}"
        );
        assert!(place.read("run/export-ollama/adapter.gguf").starts_with(b"GGUF"));
        let packed = place.run(&["export", "run", "--for", "gguf", "--quantize", "f16"]);
        if model.contains("gguf") {
            assert!(packed.done().out.contains("llama-cli -m run/export-gguf-model/model.gguf"));
            let packed = scores(&place, &["--base", "run/export-gguf-model", "--recipe", "run/recipe.resolved.toml"]);
            let difference = own["loss"].as_f64().unwrap() - packed["loss"].as_f64().unwrap();
            assert!(difference.abs() < 1e-2 && difference != 0.0, "{own} {packed}");
            let merged = place.run(&["export", "run", "--for", "merged", "--quantize", "q8_0"]).refused(2);
            assert!(merged.contains("`--quantize` is for GGUF files"), "{merged}");
        } else {
            let refused = packed.refused(2);
            assert!(refused.contains("needs a base that is a GGUF file"), "{refused}");
        }
    }
    let place = Place::new();
    let plain = place.finetune(&["model.quantize=\"nf4\"", "data.validation_fraction=0.34"]).done();
    assert!(plain.err.contains("planned"), "{}", plain.err);
    place.run(&["verify", "--conformance", "run/final"]).done();
    let merged = place.run(&["export", "run", "--for", "merged"]).done();
    assert!(merged.err.contains("trained on weights in nf4 (`model.quantize`)"), "{}", merged.err);
    let departs = place.run(&["verify", "--conformance", "run/export-merged"]).refused(1);
    assert!(departs.contains("merged and unpacked weights may decide"), "{departs}");
    let packed = format!("model.path=\"{}\"", quantised.join("model-gptq").display());
    let twice = place.check(&[&packed, "model.quantize=\"nf4\""]).refused(2);
    assert!(twice.contains("`model.quantize` is set, and"), "{twice}");
}
