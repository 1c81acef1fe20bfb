//! What a run has written, changed by somebody: refused with the place, or taken for damage; and what may be changed still may.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::workshop::{Workshop, copy_dir, names};

/// Two small steps, each saved.
fn two_steps() -> Workshop {
    let workshop = Workshop::new(4);
    workshop.finetune("", "run", &["train.max_steps=2", "train.gradient_accumulation_steps=1"]).with(0);
    workshop
}

/// Changes a file's text.
fn change(path: &Path, change: impl Fn(&str) -> String) {
    let before = fs::read_to_string(path).unwrap();
    let after = change(&before);
    assert_ne!(after, before, "{}", path.display());
    fs::write(path, after).unwrap();
}

/// Lists the files of a checkpoint anew, as somebody who knows how.
fn list_anew(checkpoint: &Path) {
    let mut files = json!({});
    for name in names(checkpoint).into_iter().filter(|name| name != "MANIFEST.json") {
        let bytes = fs::read(checkpoint.join(&name)).unwrap();
        files[name] = json!({ "size": bytes.len(), "blake3": blake3::hash(&bytes).to_hex().as_str() });
    }
    fs::write(checkpoint.join("MANIFEST.json"), json!({ "files": files }).to_string()).unwrap();
}

/// Changes a key of a checkpoint's state so that its manifest fits.
fn change_state(checkpoint: &Path, key: &str, value: &Value) {
    change(&checkpoint.join("state.json"), |text| {
        let mut state: Value = serde_json::from_str(text).unwrap();
        state[key] = value.clone();
        state.to_string()
    });
    list_anew(checkpoint);
}

/// Changes the recipe so that its last line fits.
fn change_recipe(run: &Path, from: &str, to: &str) {
    change(&run.join("recipe.resolved.toml"), |text| {
        let (text, seal) = text.rsplit_once("# BLAKE3").unwrap();
        let text = text.replacen(from, to, 1);
        let (words, _) = seal.rsplit_once(' ').unwrap();
        format!("{text}# BLAKE3{words} {}\n", blake3::hash(text.as_bytes()).to_hex())
    });
}

/// Changes a run.
type Tamper = fn(&Path);

/// Each change is refused, with words of what is wrong.
fn assert_refused(cases: &[(Tamper, &str)]) {
    let workshop = two_steps();
    for (number, (tamper, expected)) in cases.iter().enumerate() {
        let run = format!("run-{number}");
        workshop.copy("run", &run);
        tamper(&workshop.path(&run));
        let words = workshop.resume("", &run, &[]).with(3);
        assert!(words.contains(expected) && words.contains("hint: "), "{number}: {words}");
    }
}

#[test]
fn a_state_or_a_recipe_that_was_tampered_with_is_refused_with_the_place() {
    assert_refused(&[
        (
            |run| change_state(&run.join("final"), "step", &json!(1u64 << 63)),
            "state.json` can't be what this run has saved: `step` is",
        ),
        (|run| change_state(&run.join("final"), "step", &json!(3)), "metrics.jsonl`, line 3: expected step 3 with"),
        (
            |run| change_state(&run.join("final"), "total_tokens", &json!(9)),
            "metrics.jsonl`, line 3: expected step 2 with 9 tokens",
        ),
        (|run| change_state(&run.join("final"), "seed", &json!(8)), "`train.seed`: was 8, is 7"),
        (
            |run| change_recipe(run, "learning_rate = 0.01", "learning_rate = 0.02"),
            "`optimizer.learning_rate`: was 0.01, is 0.02",
        ),
        (|run| change_recipe(run, "seed = 7", "seed = 8"), "`train.seed`: was 7, is 8"),
        (|run| change_recipe(run, "[optimizer]\n", "[optimizer]\neps = 0.001\n"), "`optimizer.eps`: was not set, is 0.001"),
    ]);
}

#[test]
fn any_file_that_was_tampered_with_is_refused_with_the_place() {
    assert_refused(&[
        (
            |run| {
                change(&run.join("recipe.resolved.toml"), |text| {
                    text.replacen("learning_rate = 0.01", "learning_rate = 0.03", 1)
                });
            },
            "recipe.resolved.toml` is not as the run wrote it",
        ),
        (
            |run| change(&run.join("recipe.resolved.toml"), |text| text.rsplit_once("# BLAKE3").unwrap().0.to_owned()),
            "recipe.resolved.toml` is not as the run wrote it",
        ),
        (
            |run| change(&run.join("metrics.jsonl"), |text| text.replacen("\"targets\":", "\"targets\":1", 1)),
            "metrics.jsonl`, line 1: it is",
        ),
        (
            |run| change(&run.join("metrics.jsonl"), |text| text.replacen("\"tokens\"", "\"tokenr\"", 1)),
            "metrics.jsonl`, line 1: ",
        ),
        (
            |run| {
                change(&run.join("metrics.jsonl"), |text| {
                    let mut lines: Vec<&str> = text.split_inclusive('\n').collect();
                    lines.remove(1);
                    lines.concat()
                });
            },
            "metrics.jsonl`, line 2: it is not as it was written, or the lines before it are not",
        ),
        (
            |run| {
                let path = run.join("step-000002/optimizer.safetensors");
                let mut bytes = fs::read(&path).unwrap();
                let end = bytes.len();
                bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
                fs::write(path, bytes).unwrap();
                list_anew(&run.join("step-000002"));
                fs::remove_dir_all(run.join("final")).unwrap();
            },
            "` is not finite",
        ),
        (
            |run| {
                for name in ["best", "final", "step-000001", "step-000002"] {
                    fs::write(run.join(name).join("MANIFEST.json"), "{\"files\": {}}").unwrap();
                }
            },
            "MANIFEST.json` is damaged: it does not list `state.json`",
        ),
    ]);
}

#[test]
fn who_evaluates_a_run_that_was_tampered_with_is_told_as_well() {
    let workshop = two_steps();
    change(&workshop.path("run/recipe.resolved.toml"), |text| text.replacen("cache_length = 16", "cache_length = 17", 1));
    for target in ["run", "run/final"] {
        let words = workshop.kvtune("", &["evaluate", target]).with(3);
        assert!(words.contains("recipe.resolved.toml` is not as the run wrote it"), "{words}");
    }
}

#[test]
fn a_newest_checkpoint_without_its_list_of_files_is_set_aside() {
    let workshop = two_steps();
    let whole = workshop.left("run");
    for (run, text) in [("empty", Some("")), ("nothing", Some("{\"files\": {}}")), ("none", None)] {
        workshop.copy("run", run);
        let manifest = workshop.path(run).join("final/MANIFEST.json");
        text.map_or_else(|| fs::remove_file(&manifest), |text| fs::write(&manifest, text)).unwrap();
        let words = workshop.resume("", run, &[]).with(0);
        assert_eq!(words.matches("warning: skipped `").count(), 1, "{words}");
        assert!(words.contains(&format!("; it is now `{run}/final.damaged`")), "{words}");
        assert!(workshop.path(run).join("final.damaged/state.json").exists());
        workshop.assert_left(run, &whole);
        let words = workshop.resume("", run, &["--from", "final.damaged"]).with(2);
        assert!(words.contains("has no checkpoint `final.damaged`"), "{words}");
    }
}

#[test]
fn what_may_change_in_a_run_still_may() {
    let workshop = two_steps();
    // More steps, and data that lie elsewhere; then on as it was written down.
    fs::rename(workshop.path("train.jsonl"), workshop.path("moved.jsonl")).unwrap();
    copy_dir(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2"), &workshop.path("model"));
    let moved = |key: &str, name: &str| format!("{key}={}", workshop.path(name).display());
    let (data, model) = (moved("data.train", "moved.jsonl"), moved("model.path", "model"));
    let set = ["--set", "train.max_steps=3", "--set", &data, "--set", &model];
    let killed = workshop.resume("checkpoint.make_dir=kill:1", "run", &set);
    assert_eq!(killed.code, Err(9), "{}", killed.stderr);
    let words = workshop.resume("", "run", &[]).with(0);
    assert!(words.contains("resuming after step 2"), "{words}");
    assert!(workshop.resume("", "run", &[]).with(0).contains("3 steps are made, the recipe asks for 3"));
    // Without its metrics a run begins new ones.
    fs::remove_file(workshop.path("run/metrics.jsonl")).unwrap();
    workshop.resume("", "run", &["--set", "train.max_steps=4"]).with(0);
    workshop.resume("", "run", &["--set", "train.max_steps=5"]).with(0);
}
