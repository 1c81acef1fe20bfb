//! Steps that come to nothing: numbers that are not finite, losses that explode, and steps that are given up on a signal.

use std::fs;

use rustix::process::Signal;
use serde_json::Value;

use super::workshop::{Left, Workshop, ended, finetune_arguments, send, wait_for_stop};

/// Six steps, of which the second and the fourth are saved.
const SET: &[&str] = &[
    "train.max_steps=6",
    "train.gradient_accumulation_steps=1",
    "eval.interval=3",
    "checkpoint.save_interval=2",
    "checkpoint.intermediate_save_interval=100",
];

fn losses(left: &Left) -> Vec<f64> {
    left.metrics.iter().filter_map(|line| line["loss"].as_f64()).collect()
}

/// The lines of metrics without the reason why a step was left out, and the steps that were.
fn skipped(left: &Left) -> (Vec<Value>, Vec<u64>) {
    let mut lines = left.metrics.clone();
    let mut steps = Vec::new();
    for line in &mut lines {
        if line.as_object_mut().unwrap().remove("skipped").is_some() {
            steps.push(line["step"].as_u64().unwrap());
        }
    }
    (lines, steps)
}

#[test]
fn a_loss_that_explodes_ends_the_run_is_left_out_or_rolled_back() {
    let workshop = Workshop::new(8);
    let whole = workshop.finished("whole", SET);
    let losses = losses(&whole);
    let mut sorted = losses.clone();
    sorted.sort_by(f64::total_cmp);
    // One step alone is above it, at first.
    let most = f64::midpoint(sorted[4], sorted[5]);
    let worst = losses.iter().position(|&loss| loss > most).unwrap() as u64 + 1;
    let bound = format!("train.max_loss={most}");
    let with = |way: &'static str| [SET, &[bound.as_str(), way]].concat();
    let words = workshop.finetune("", "stop", &with("train.on_non_finite=stop")).with(5);
    assert!(words.contains(&format!("step {worst}: the loss is ")) && words.contains("above `train.max_loss`"), "{words}");

    let skip = workshop.finished("skip", &with("train.on_non_finite=skip"));
    let back = workshop.finished("back", &with("train.on_non_finite=rollback"));
    let ((lines, steps), (lines_back, steps_back)) = (skipped(&skip), skipped(&back));
    assert_eq!(steps[0], worst);
    assert_eq!((&lines, &steps), (&lines_back, &steps_back), "what is left out is the same");
    let [a, b] = [&skip, &back].map(|left| &left.files["final/adapter_model.safetensors"]);
    assert!(a == b, "and what is trained");
    assert!(*a != whole.files["final/adapter_model.safetensors"]);
    // Killed and resumed they end as they do at once.
    for way in ["skip", "rollback"] {
        let (run, way) = (format!("killed-{way}"), format!("train.on_non_finite={way}"));
        let set = [SET, &[bound.as_str(), &way]].concat();
        let killed = workshop.finetune("checkpoint.make_dir=kill:5", &run, &set);
        assert_eq!(killed.code, Err(9), "{}", killed.stderr);
        workshop.resume("", &run, &[]).with(0);
        assert!(workshop.left(&run).files["final/adapter_model.safetensors"] == *a, "{run}");
    }
}

#[test]
fn too_many_in_a_row_end_the_run() {
    let workshop = Workshop::new(8);
    for way in ["skip", "rollback"] {
        let way = format!("train.on_non_finite={way}");
        let set = [SET, &["train.max_loss=0.001", "train.max_skipped_steps=2", &way]].concat();
        let words = workshop.finetune("", &way, &set).with(5);
        assert_eq!(words.matches("steps: 6").count(), 1, "what a run begins with is told once: {words}");
        assert!(words.contains("step 3: the loss is "), "{words}");
        assert!(words.contains("left out: step 1") || words.contains("without step 1"), "{words}");
    }
}

#[test]
fn an_update_that_is_not_finite_is_never_saved() {
    let workshop = Workshop::new(8);
    let set =
        [SET, &["optimizer.learning_rate=1e38", "optimizer.warmup_steps=0", "train.max_steps=1", "eval.interval=1"]].concat();
    let words = workshop.finetune("", "run", &set).with(5);
    assert!(words.contains("step 1: its update made `") && words.contains("hint:"), "{words}");
    assert!(workshop.checkpoints("run").is_empty());
    let set = [&set[..], &["train.on_non_finite=rollback"]].concat();
    workshop.finetune("", "back", &set).with(0);
    let left = workshop.left("back");
    assert_eq!(skipped(&left).1, [1], "the one step of the run is left out");
}

#[test]
fn sigterm_gives_up_what_is_under_way_and_the_run_goes_on_to_the_bit() {
    let workshop = Workshop::new(8);
    let whole = workshop.finished("whole", SET);
    // In the fourth step; in the validation after the third; in the one before the first step.
    for (failpoint, saved) in [
        ("run.step=stop:4", &["best", "step-000002", "step-000003"][..]),
        ("run.validate=stop:2", &["step-000002", "step-000003"]),
        ("run.validate=stop:1", &[]),
    ] {
        let run = failpoint.replace([':', '='], "-");
        let child = workshop.command(failpoint, &finetune_arguments(&run, SET)).spawn().unwrap();
        wait_for_stop(&child);
        send(&child, Signal::TERM);
        send(&child, Signal::CONT);
        let words = ended(child).with(143);
        assert!(words.contains("interrupted; go on with"), "{words}");
        assert_eq!(workshop.checkpoints(&run), saved, "{failpoint}");
        workshop.resume("", &run, &[]).with(0);
        let found = workshop.left(&run);
        assert_eq!(found.metrics, whole.metrics, "{failpoint}");
        for (name, bytes) in whole.files.iter().filter(|(name, _)| !name.starts_with("best")) {
            assert!(found.files[name] == *bytes, "{failpoint}: `{name}` differs");
        }
    }
}

#[test]
fn a_validation_that_fails_loses_no_step() {
    let workshop = Workshop::new(8);
    let whole = workshop.finished("whole", SET);
    // The second is the one after the third step, at which no save is due.
    let words = workshop.finetune("run.validate=eio:2", "run", SET).with(1);
    assert!(words.contains("cannot validate in"), "{words}");
    assert_eq!(workshop.checkpoints("run"), ["step-000002", "step-000003"]);
    workshop.resume("", "run", &[]).with(0);
    let found = workshop.left("run");
    assert_eq!(found.metrics, whole.metrics);
    assert!(found.files["final/adapter_model.safetensors"] == whole.files["final/adapter_model.safetensors"]);
}

#[test]
fn a_step_is_brought_to_its_end_where_the_recipe_says_so_and_on_ctrl_c() {
    let workshop = Workshop::new(8);
    let finish = [SET, &["checkpoint.on_sigterm=finish_step"]].concat();
    for (signal, set, code) in [(Signal::TERM, &finish[..], 143), (Signal::INT, SET, 130)] {
        let run = code.to_string();
        let child = workshop.command("run.step=stop:3", &finetune_arguments(&run, set)).spawn().unwrap();
        wait_for_stop(&child);
        send(&child, signal);
        send(&child, Signal::CONT);
        ended(child).with(code);
        assert_eq!(workshop.latest(&run), "step-000003");
    }
}

#[test]
fn sigusr1_saves_and_the_run_goes_on() {
    let workshop = Workshop::new(8);
    let whole = workshop.finished("whole", SET);
    let child = workshop.command("run.step=stop:3", &finetune_arguments("run", SET)).spawn().unwrap();
    wait_for_stop(&child);
    send(&child, Signal::USR1);
    send(&child, Signal::CONT);
    let words = ended(child).with(0);
    assert!(words.contains("saved run/step-000003"), "{words}");
    let found = workshop.left("run");
    assert_eq!(found.metrics, whole.metrics);
    assert!(whole.files.iter().all(|(name, bytes)| found.files[name] == *bytes));
}

#[test]
fn another_number_of_threads_and_a_spoilt_state_are_told() {
    let workshop = Workshop::new(8);
    workshop.finished("run", SET);
    let path = workshop.path("run/step-000004/state.json");
    let state: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let other = if state["threads"] == 1 { "2" } else { "1" };
    let words = workshop.resume("", "run", &["--from", "step-000004", "--threads", other]).with(0);
    assert!(words.contains("threads computed until here") || words.contains("sums have another order"), "{words}");
}
