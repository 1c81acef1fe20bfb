//! Runs and checkpoints that can't be gone on with, or evaluated.

use std::fs;

use insta::assert_snapshot;
use serde_json::json;

use super::place::{Place, row};

/// A finished run of three steps.
fn trained() -> Place {
    let place = Place::new();
    place.finetune(&[]).done();
    place
}

fn resume(place: &Place, arguments: &[&str]) -> super::place::Said {
    place.run(&[&["resume", "run", "--device", "cpu"][..], arguments].concat())
}

/// Changes one byte in the middle of a file.
fn damage(place: &Place, name: &str) {
    let mut bytes = place.read(name);
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    place.write(name, bytes);
}

#[test]
fn of_another_model() {
    let place = trained();
    let words: Vec<String> = (0..3000).map(|i| (i * 7919 % 4096).to_string()).collect();
    place.write("text.txt", words.join(" "));
    place.write("wide.json", place.read("model/config.json"));
    place.edit_json("wide.json", json!({"intermediate_size": 128}));
    place.run(&["init-model", "--config", "wide.json", "--tokenizer-from", "text.txt", "--out", "wide"]).done();
    let error = place.run(&["evaluate", "run", "--split", "train", "--device", "cpu", "--set", "model.path=wide"]).refused(3);
    assert!(error.starts_with("error: `run/final/adapter_model.safetensors` does not fit the model:"), "{error}");
    fs::rename(place.path("model"), place.path("old")).unwrap();
    fs::rename(place.path("wide"), place.path("model")).unwrap();
    assert_snapshot!(resume(&place, &["--set", "train.max_steps=4", "--set", "train.epochs=2"]).refused(3), @r"
    error: the checkpoint `run/final` belongs to another model or adapter: `<dir>/model` is not as it was when the run began

    hint: resume with the model and the settings that the run began with
    ");
}

#[test]
fn with_another_recipe() {
    let place = trained();
    let error = resume(&place, &["--set", "lora.r=8", "--set", "train.seed=2"]).refused(2);
    assert_snapshot!(error, @r"
    error: a resumed run must go on as it began, but the recipe differs:
      `lora.r`: was 4, is 8
      `train.seed`: was 1, is 2

    hint: only the length of the run, logging, saving, `grad.*`, `kv_cache.cpu_offload` and the paths of model and data may change on resume
    ");
}

#[test]
fn with_other_data() {
    let place = trained();
    place.write("train.jsonl", (1..7).map(row).collect::<String>());
    assert_snapshot!(resume(&place, &[]).refused(3), @r"
    error: `<dir>/train.jsonl` has changed since the checkpoint was written

    hint: restore the file, or begin a new run: a resumed run goes on at the same place of the same data
    ");
}

#[test]
fn that_the_run_does_not_have() {
    let place = trained();
    assert_snapshot!(resume(&place, &["--from", "step-000007"]).refused(2), @r"
    error: the run `run` has no checkpoint `step-000007`: expected final, step-000001, step-000002, step-000003

    hint: name one of these, or leave `--from` out for the newest
    ");
    let error = resume(&place, &["--from", "../run/final"]).refused(2);
    assert!(error.starts_with("error: the run `run` has no checkpoint `../run/final`"), "{error}");
    resume(&place, &["--from", "step-000002"]).done();
}

#[test]
fn that_is_no_run() {
    let place = Place::new();
    assert_snapshot!(resume(&place, &[]).refused(2), @r"
    error: `run` is not the directory of a run: it has no `recipe.resolved.toml`

    hint: name the directory of a run, which `kvtune finetune-lora` or `finetune-full` has written
    ");
    assert_snapshot!(place.run(&["evaluate", "nowhere", "--device", "cpu"]).refused(2), @r"
    error: `nowhere` is not the directory of a run: it has no `recipe.resolved.toml`

    hint: name the directory of a run, which `kvtune finetune-lora` or `finetune-full` has written
    ");
    assert!(!place.path("run").exists());
}

#[test]
fn that_is_damaged() {
    let place = trained();
    damage(&place, "run/final/adapter_model.safetensors");
    assert_snapshot!(place.run(&["evaluate", "run/final", "--split", "train", "--device", "cpu"]).refused(3), @r"
    error: `run/final/adapter_model.safetensors` is damaged: its content has changed

    hint: use another checkpoint of the run, as `step-000100`
    ");
    assert_snapshot!(resume(&place, &["--from", "final"]).refused(3), @r"
    error: `run/final/adapter_model.safetensors` is damaged: its content has changed

    hint: use another checkpoint of the run, as `step-000100`
    ");
    // Another valid one is found, and the damaged one is named.
    let evaluated = place.run(&["evaluate", "run", "--split", "train", "--device", "cpu"]).done();
    let resumed = resume(&place, &["--set", "train.max_steps=4", "--set", "train.epochs=2"]).done();
    for said in [evaluated, resumed] {
        assert!(
            said.err.contains("warning: skipped `run/final`: `run/final/adapter_model.safetensors` is damaged"),
            "{}",
            said.err
        );
    }
    assert!(place.path("run/step-000004").exists());
}

#[test]
fn none_of_which_is_valid() {
    let place = trained();
    for name in ["final", "step-000001", "step-000002", "step-000003"] {
        fs::remove_file(place.path("run").join(name).join("MANIFEST.json")).unwrap();
    }
    assert_snapshot!(resume(&place, &[]).refused(3), @r"
    error: `run` has no valid checkpoint
      skipped `run/final`: `run/final` is not a finished checkpoint: it has no `MANIFEST.json`
      skipped `run/step-000003`: `run/step-000003` is not a finished checkpoint: it has no `MANIFEST.json`
      skipped `run/step-000002`: `run/step-000002` is not a finished checkpoint: it has no `MANIFEST.json`
      skipped `run/step-000001`: `run/step-000001` is not a finished checkpoint: it has no `MANIFEST.json`

    hint: begin the run again with another `--out`, or remove this directory first
    ");
    assert_eq!(place.names("run").iter().filter(|name| name.starts_with("step-")).count(), 3, "nothing is removed");
}
