//! Losses that aren't finite: step and sample are named, and nothing is changed.

use insta::assert_snapshot;

use super::place::Place;

const FILE: &str = "model/model.safetensors";

/// Puts a NaN into the final norm's weights.
fn spoil(place: &Place) {
    let mut bytes = place.read(FILE);
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let offset = 8 + length + header["model.norm.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[offset..offset + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    place.write(FILE, bytes);
}

#[test]
fn training_stops_with_step_and_samples_and_the_checkpoint_as_it_was() {
    let place = Place::new();
    let error = place.finetune(&["optimizer.learning_rate=1e30", "optimizer.warmup_steps=0"]).refused(5);
    assert_snapshot!(error, @r"
    error: step 2: the loss (and the gradient of `base_model.model.model.layers.0.mlp.down_proj.lora_A.weight`) is not finite, in samples 1, 2 (counted from 0)

    hint: what was saved before is intact: look at these samples and at the model's weights, or begin again with a lower `optimizer.learning_rate`
    ");
    let files = ["adapter_model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"];
    let saved = || files.map(|file| place.read(&format!("run/step-000001/{file}")));
    let (before, names) = (saved(), place.names("run"));
    assert_eq!(place.run(&["resume", "run", "--device", "cpu"]).refused(5), error);
    assert_eq!((saved(), place.names("run")), (before, names));
    assert_eq!(String::from_utf8(place.read("run/metrics.jsonl")).unwrap().lines().count(), 1);
}

#[test]
fn the_first_step_leaves_no_checkpoint() {
    let place = Place::new();
    spoil(&place);
    let error = place.finetune(&["train.micro_batch_size=1"]).refused(5);
    assert!(
        error.starts_with("error: step 1: the loss (and the gradient of `") && error.contains("is not finite, in sample "),
        "{error}"
    );
    assert!(!place.names("run").iter().any(|name| name.starts_with("step") || name == "final"));
}

#[test]
fn evaluations_and_proofs_say_so_too() {
    let place = Place::new();
    spoil(&place);
    let evaluate = ["evaluate", "--base", "model", "--recipe", "recipe.toml", "--split", "train", "--device", "cpu"];
    assert_snapshot!(place.run(&evaluate).refused(5), @r"
    error: the loss of sample 0 (counted from 0) is NaN

    hint: the weights or the adapter may be damaged, or the dtype too narrow for them
    ");
    // What is wrong with the request comes before the losses.
    place.write("classes.jsonl", "{\"sample\": 0, \"classes\": {\"first\": [0]}}\n");
    let windows = ["--token-classes", "classes.jsonl", "--set", "data.max_seq_length=20", "--set", "data.on_too_long=split"];
    let error = place.run(&[&evaluate[..], &windows].concat()).refused(2);
    assert!(error.contains("for sample 0, and several samples have this index"), "{error}");
    assert_snapshot!(place.on_cpu("verify", &[]).refused(5), @r"
    error: the loss is not finite, in sample 0 (counted from 0)

    hint: look at this sample and at the model's weights
    ");
    let dump = ["verify", "--recipe", "recipe.toml", "--device", "cpu", "--dump", "dump"];
    place.run(&dump).refused(5);
    assert!(!place.path("dump").exists());
}
