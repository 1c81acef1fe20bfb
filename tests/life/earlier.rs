//! A run that an earlier version began, and left in the middle, goes on to where that version would have brought it.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::workshop::Workshop;

/// What a step has to show that does not depend on the machine: its number, its loss, and the hash of its choices.
fn shown(metrics: &str) -> Vec<(u64, f64, String)> {
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let of_line = |line: Value| {
        let (step, loss) = (line["step"].as_u64().unwrap(), line["loss"].as_f64().unwrap());
        (step, loss, line["replay_log"].as_str().unwrap().to_owned())
    };
    lines.map(of_line).collect()
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

    workshop.resume("", "run", &[]).with(0);
    let (ours, theirs) =
        (fs::read_to_string(run.join("metrics.jsonl")).unwrap(), fs::read_to_string(kept.join("whole.jsonl")).unwrap());
    let (ours, theirs) = (shown(&ours), shown(&theirs));
    assert_eq!(ours.len(), theirs.len());
    for ((step, loss, choices), (_, expected, recorded)) in ours.into_iter().zip(theirs) {
        // Another processor's products round otherwise.
        assert!((loss - expected).abs() <= 1e-4 * expected, "step {step}: {loss}, expected {expected}");
        assert_eq!(choices, recorded, "step {step}");
    }
    assert!(run.join("final/adapter_model.safetensors").exists());
}
