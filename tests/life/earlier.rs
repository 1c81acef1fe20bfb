//! A run that an earlier version began, and left in the middle, goes on to where that version would have brought it.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::workshop::Workshop;

/// Number and loss of each step.
fn losses(metrics: &str) -> Vec<(u64, f64)> {
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.map(|line| (line["step"].as_u64().unwrap(), line["loss"].as_f64().unwrap())).collect()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &target);
        } else {
            fs::copy(&path, &target).unwrap();
        }
    }
}

#[test]
fn a_run_that_an_earlier_version_began_goes_on() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let (kept, workshop) = (fixtures.join("earlier-run"), Workshop::new(1));
    let run = workshop.path("run");
    copy(&kept, &run);
    for name in ["train.jsonl", "whole.jsonl"] {
        fs::remove_file(run.join(name)).unwrap();
    }
    fs::copy(kept.join("train.jsonl"), workshop.path("train.jsonl")).unwrap();
    let recipe = fs::read_to_string(run.join("recipe.resolved.toml")).unwrap();
    let recipe = recipe.replace("MODEL", fixtures.join("model-qwen2").to_str().unwrap());
    let recipe = recipe.replace("TRAIN", workshop.path("train.jsonl").to_str().unwrap());
    fs::write(run.join("recipe.resolved.toml"), recipe).unwrap();

    let words = workshop.resume("", "run", &[]).with(0);
    let note = "an earlier version saved this checkpoint: whether recipe and metrics are as it left them can't be checked";
    assert_eq!(words.matches(note).count(), 1, "{words}");
    let (ours, theirs) =
        (fs::read_to_string(run.join("metrics.jsonl")).unwrap(), fs::read_to_string(kept.join("whole.jsonl")).unwrap());
    let (ours, theirs) = (losses(&ours), losses(&theirs));
    assert_eq!(ours.len(), theirs.len());
    // Another processor's products round otherwise; another choice would show in the loss. The hashes of the choices are others since
    // sequences that have ended leave their batch, and have none.
    for ((step, loss), (_, expected)) in ours.into_iter().zip(theirs) {
        assert!((loss - expected).abs() <= 1e-5 * expected, "step {step}: {loss}, expected {expected}");
    }
    assert!(run.join("final/adapter_model.safetensors").exists());
}
