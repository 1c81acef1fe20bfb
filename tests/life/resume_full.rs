//! A run that trains all weights is resumed to the bit, and what it leaves is a model.

use std::fs;
use std::path::Path;

use super::workshop::{Workshop, names};

const SIX_STEPS: &[&str] = &["train.max_steps=6", "eval.interval=2"];
const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/model-qwen2");

/// 13 ragged samples, and a recipe without `[lora]`.
fn workshop() -> Workshop {
    Workshop::new(13).without_adapter()
}

#[test]
fn from_some_steps_to_the_bit() {
    let workshop = workshop();
    workshop.finetune_full("whole", SIX_STEPS).with(0);
    let whole = workshop.left("whole");
    assert!(whole.metrics[6]["loss"].as_f64() < whole.metrics[1]["loss"].as_f64(), "it learns");
    for k in [1, 3, 5] {
        let (run, from) = (format!("from-{k}"), format!("step-{k:06}"));
        workshop.copy("whole", &run);
        let words = workshop.resume("", &run, &["--from", &from]).with(0);
        assert!(words.contains(&format!("resuming after step {k} from")), "{words}");
        workshop.assert_left(&run, &whole);
    }
    let words = workshop.resume("", "whole", &["--set", "lora.r=4", "--set", "train.max_steps=7"]).with(2);
    assert!(words.contains("`[lora]` says nothing where all weights are trained"), "{words}");
}

/// The corrections of its routers are saved, and not trained.
#[test]
fn a_model_with_constants_to_the_bit() {
    let workshop = workshop();
    let base = concat!("model.path=", env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/families/model-glm4-moe");
    workshop.finetune_full("whole", &[base, "train.max_steps=2"]).with(0);
    let whole = workshop.left("whole");
    workshop.copy("whole", "from-1");
    workshop.resume("", "from-1", &["--from", "step-000001"]).with(0);
    workshop.assert_left("from-1", &whole);
}

/// The masters of weights in bf16 are saved beside them.
#[test]
fn in_bf16_with_masters_in_f32_to_the_bit() {
    let workshop = workshop();
    let whole = |run: &str, more: &[&str]| {
        workshop
            .finetune_full(run, &[&["model.dtype=bf16", "train.max_steps=3", "optimizer.learning_rate=1e-3"], more].concat())
            .with(0);
        workshop.left(run)
    };
    let left = whole("whole", &[]);
    assert!(left.metrics[3]["loss"].as_f64() < left.metrics[1]["loss"].as_f64(), "it learns");
    workshop.copy("whole", "from-1");
    workshop.resume("", "from-1", &["--from", "step-000001"]).with(0);
    workshop.assert_left("from-1", &left);
    // Where the CPU computes, what waits on the host is where it was.
    let offloaded = whole("offloaded", &["train.offload=weights"]);
    assert_eq!(offloaded.metrics[3]["loss"], left.metrics[3]["loss"]);
}

#[test]
fn what_is_left_is_a_model() {
    let workshop = workshop();
    workshop.finetune_full("run", SIX_STEPS).with(0);
    let left = names(&workshop.path("run/final"));
    let mut expected = names(Path::new(FIXTURE));
    expected.extend(["MANIFEST.json", "README.md", "kv_policy.json", "state.json"].map(str::to_owned));
    expected.sort();
    assert_eq!(left, expected);
    let scores = |arguments: &[&str]| {
        let said = workshop.kvtune("", &[&["evaluate", "--format", "json"][..], arguments].concat());
        assert_eq!(said.code, Ok(0), "{}", said.stderr);
        let value: serde_json::Value = serde_json::from_str(&said.stdout).unwrap();
        value["scores"]["overall"]["loss"].clone()
    };
    let of_run = scores(&["run"]);
    let metrics = workshop.left("run").metrics;
    assert!(of_run.is_f64() && of_run == metrics[6]["eval_loss"], "{of_run}");
    assert_eq!(of_run, scores(&["run/final"]));
    assert_eq!(of_run, scores(&["--base", "run/final", "--recipe", "recipe.toml"]));
    assert_ne!(of_run, scores(&["--base", FIXTURE, "--recipe", "recipe.toml"]));
    assert_ne!(of_run, scores(&["run/step-000001"]));
    // An adapter is trained on it, and all of it once more.
    workshop.finetune("", "adapter", &["model.path=run/final", "train.max_steps=1"]).with(0);
    workshop.finetune_full("again", &["model.path=run/final", "train.max_steps=1"]).with(0);
    assert!(fs::exists(workshop.path("adapter/final/adapter_config.json")).unwrap());
}

#[test]
fn intermediate_saves_go_and_a_base_that_is_gone_hinders_no_save() {
    let workshop = workshop();
    super::workshop::copy_dir(Path::new(FIXTURE), &workshop.path("model"));
    let set = ["model.path=model", "train.max_steps=6", "checkpoint.intermediate_save_keep=1"];
    let child = workshop.command("", &super::workshop::finetune_full_arguments("run", &set)).spawn().unwrap();
    workshop.wait_for_lines("run", 1);
    fs::remove_dir_all(workshop.path("model")).unwrap();
    super::workshop::ended(child).with(0);
    assert_eq!(workshop.checkpoints("run"), ["best", "final", "step-000004", "step-000006"]);
}
