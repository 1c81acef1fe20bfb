//! Runs that are killed, run into a full disk or find a damaged checkpoint, and still end as if nothing had happened.

use std::fs;
use std::sync::LazyLock;

use super::workshop::{Left, Workshop, assert_valid, ended, finetune_arguments, leftovers, names};

/// Six short steps: 3 and 6 saved for good, of the others the last two; the best is replaced on the way.
const SET: &[&str] = &[
    "train.max_steps=6",
    "train.gradient_accumulation_steps=1",
    "eval.interval=2",
    "checkpoint.save_interval=3",
    "checkpoint.intermediate_save_keep=2",
];

/// With the run that nothing happens to.
fn workshop() -> (Workshop, Left) {
    let workshop = Workshop::new(8);
    let whole = workshop.finished("whole", SET);
    (workshop, whole)
}

/// With what that run leaves, which is made once.
fn workshop_for_runs() -> (Workshop, &'static Left) {
    static WHOLE: LazyLock<Left> = LazyLock::new(|| workshop().1);
    (Workshop::new(8), &WHOLE)
}

#[test]
fn only_the_last_intermediate_saves_stay() {
    let (workshop, whole) = workshop();
    let expected = ["best", "final", "step-000003", "step-000004", "step-000005", "step-000006"];
    assert_eq!(workshop.checkpoints("whole"), expected);
    for name in expected {
        assert_valid(&workshop.path("whole").join(name));
    }
    let state =
        |name: &str| -> serde_json::Value { serde_json::from_slice(&whole.files[&format!("{name}/state.json")]).unwrap() };
    let kinds = ["best", "final", "regular", "intermediate", "intermediate", "regular"];
    assert_eq!(expected.map(|name| state(name)["kind"].as_str().unwrap().to_owned()), kinds);
    assert!(state("best")["step"].as_u64() > Some(2), "it was replaced: {}", state("best")["step"]);
    workshop.assert_left("whole", &whole);
}

#[test]
fn killed_inside_a_save() {
    let (workshop, whole) = workshop_for_runs();
    let kills = [
        "checkpoint.make_dir=kill:1",
        "file.write=kill:4",
        "file.sync=kill:18",
        "file.rename=kill:25",
        "dir.sync=kill:30",
        "dir.rename=kill:4",
        "checkpoint.verify=kill:5",
        "checkpoint.rename=kill:1",
    ];
    let mut with_leftovers = 0;
    for (number, failpoint) in kills.into_iter().enumerate() {
        let run = format!("run-{number}");
        let killed = workshop.finetune(failpoint, &run, SET);
        assert_eq!(killed.code, Err(9), "{failpoint}: {}", killed.stderr);
        let left = leftovers(&workshop.path(&run));
        with_leftovers += usize::from(!left.is_empty());
        let words = workshop.resume("", &run, &[]).with(0);
        for name in left {
            assert!(words.contains(&format!("{name}`, left by a save that was cut short")), "{words}");
        }
        assert_eq!(words.contains("beginning again"), number < 2, "{failpoint}: {words}");
        workshop.assert_left(&run, whole);
    }
    assert!(with_leftovers > 3, "{with_leftovers}");
}

#[test]
fn killed_anywhere() {
    let (workshop, whole) = workshop_for_runs();
    for lines in [1, 3, 5] {
        let run = format!("after-{lines}");
        let mut child = workshop.command("", &finetune_arguments(&run, SET)).spawn().unwrap();
        workshop.wait_for_lines(&run, lines);
        child.kill().unwrap();
        ended(child);
        workshop.resume("", &run, &[]).with(0);
        workshop.assert_left(&run, whole);
    }
    // In the middle of a line of metrics, before and after the first checkpoint.
    for lines in [2, 5] {
        let run = format!("within-{lines}");
        assert_eq!(workshop.finetune(&format!("metrics.write=kill:{lines}"), &run, SET).code, Err(9));
        assert!(!fs::read_to_string(workshop.path(&run).join("metrics.jsonl")).unwrap().ends_with('\n'));
        workshop.resume("", &run, &[]).with(0);
        workshop.assert_left(&run, whole);
    }
}

/// Where a recipe is, a split is; a start that had neither begins anew, and one of an earlier version gets its split when it goes on.
#[test]
fn killed_before_the_first_step() {
    let (workshop, whole) = workshop_for_runs();
    for (number, rename) in [1, 2, 3].into_iter().enumerate() {
        let run = format!("early-{number}");
        assert_eq!(workshop.finetune(&format!("file.rename=kill:{rename}"), &run, SET).code, Err(9));
        let has = |name: &str| workshop.path(&run).join(name).exists();
        assert!(!has("recipe.resolved.toml") || has("split.json"), "{rename}: {:?}", names(&workshop.path(&run)));
        if has("recipe.resolved.toml") {
            fs::remove_file(workshop.path(&run).join("split.json")).unwrap();
            workshop.resume("", &run, &[]).with(0);
        } else {
            workshop.finetune("", &run, SET).with(0);
        }
        assert!(workshop.path(&run).join("split.json").exists());
        assert_eq!(workshop.left(&run).metrics, whole.metrics, "{run}");
    }
}

#[test]
fn killed_again_and_again() {
    let (workshop, whole) = workshop_for_runs();
    assert_eq!(workshop.finetune("any=kill:80", "run", SET).code, Err(9));
    let mut kills = 1;
    // Each start gets through one save, and dies in the next.
    while workshop.resume("any=kill:80", "run", &[]).code == Err(9) {
        kills += 1;
        assert!(kills < 20, "no progress");
    }
    assert!(kills > 3, "{kills}");
    workshop.assert_left("run", whole);
}

#[test]
fn killed_before_there_was_a_run() {
    let (workshop, whole) = workshop_for_runs();
    for n in 1..=6 {
        let run = format!("run-{n}");
        assert_eq!(workshop.finetune(&format!("any=kill:{n}"), &run, SET).code, Err(9));
        let words = workshop.resume("", &run, &[]).with(2);
        assert!(words.contains("not the directory of a run"), "{words}");
    }
    workshop.finetune("", "run-3", SET).with(0);
    workshop.resume("", "run-3", &[]).with(0);
    workshop.assert_left("run-3", whole);
}

/// A run that is about to save its third step, after which the first goes; and what it leaves if nothing happens.
fn before_a_save() -> (Workshop, Left) {
    let set = [
        "train.max_steps=4",
        "train.gradient_accumulation_steps=1",
        "eval.interval=100",
        "eval.initial=false",
        "checkpoint.save_interval=100",
        "checkpoint.intermediate_save_keep=2",
    ];
    let workshop = Workshop::new(8);
    let whole = workshop.finished("whole", &set);
    assert_eq!(workshop.finetune("checkpoint.make_dir=kill:3", "base", &set).code, Err(9));
    assert_eq!(workshop.checkpoints("base"), ["step-000001", "step-000002"]);
    (workshop, whole)
}

/// Lets every ninth operation up to the end of the third step's save fail, from the `first`. All operations with all failures are tried
/// within one process, where saving lives; here it is the run that must end in good order.
fn places_fail(action: &str, first: usize) {
    let (workshop, whole) = before_a_save();
    for n in (first..).step_by(9) {
        let run = format!("run-{n}");
        workshop.copy("base", &run);
        let failed = workshop.resume(&format!("any={action}:{n}"), &run, &[]);
        if failed.stderr.contains("no more TensorBoard events") {
            failed.with(0);
            workshop.assert_left(&run, &whole);
            continue;
        }
        if failed.stderr.contains("step-000003\n") {
            assert!(n > 55, "{n} operations are not all of a save");
            break;
        }
        let words = failed.with(1);
        assert!(words.contains("error: cannot ") && words.contains("cause: "), "{n}: {words}");
        assert!(action != "enospc" || words.contains("`kvtune resume`"), "{n}: {words}");
        let dir = workshop.path(&run);
        for name in ["step-000002", &workshop.latest(&run)] {
            assert_valid(&dir.join(name));
        }
        // The first goes when the third is safe; what of it could not be removed is in nobody's way.
        if dir.join("step-000001").exists() {
            assert_valid(&dir.join("step-000001"));
            assert_eq!(leftovers(&dir), [""; 0], "{n}");
        } else {
            assert_valid(&dir.join("step-000003"));
        }
        workshop.resume("", &run, &[]).with(0);
        workshop.assert_left(&run, &whole);
    }
}

#[test]
fn the_first_and_every_ninth_operation_of_a_save_fails() {
    places_fail("eio", 1);
}

#[test]
fn the_disk_is_full_at_operations_between() {
    places_fail("enospc", 5);
}

#[test]
fn a_damaged_checkpoint_is_skipped() {
    let (workshop, whole) = workshop();
    // Damages one byte in the middle of each file of a checkpoint in turn.
    let damage = |checkpoint: &str, number: usize, run: &str| {
        workshop.copy("whole", run);
        let dir = workshop.path(run).join(checkpoint);
        let path = dir.join(names(&dir).iter().filter(|name| *name != "README.md").nth(number).unwrap());
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&path, bytes).unwrap();
    };
    for number in 0..5 {
        let run = format!("final-{number}");
        damage("final", number, &run);
        let words = workshop.resume("", &run, &[]).with(0);
        assert!(
            words.contains("warning: skipped `final-")
                && words.contains("/final.damaged`")
                && words.contains("resuming after step 6 from"),
            "{words}"
        );
        workshop.assert_left(&run, &whole);

        let run = format!("step-{number}");
        damage("step-000006", number, &run);
        for name in ["best", "final"] {
            fs::remove_dir_all(workshop.path(&run).join(name)).unwrap();
        }
        let words = workshop.resume("", &run, &[]).with(0);
        assert!(
            words.contains("step-000006`: ")
                && words.contains("/step-000006.damaged`")
                && words.contains("resuming after step 5 from"),
            "{words}"
        );
        let found = workshop.left(&run);
        assert_eq!(found.metrics, whole.metrics);
        for (name, bytes) in &found.files {
            assert!(whole.files[name] == *bytes, "{run}: `{name}` differs");
        }
    }
}

#[test]
fn with_nothing_but_damage_the_run_says_so() {
    let (workshop, _) = workshop();
    fs::remove_dir_all(workshop.path("whole/final")).unwrap();
    for name in workshop.checkpoints("whole") {
        fs::remove_file(workshop.path("whole").join(name).join("optimizer.safetensors")).unwrap();
    }
    let words = workshop.resume("", "whole", &[]).with(3);
    assert!(words.contains("has no valid checkpoint") && words.matches("it is missing").count() == 5, "{words}");
    let words = workshop.resume("", "whole", &["--from", "step-000003"]).with(3);
    assert!(words.contains("optimizer.safetensors` is damaged: it is missing"), "{words}");
}

#[test]
fn a_loss_that_is_not_finite_stops_the_run_and_spares_the_checkpoint() {
    let workshop = Workshop::new(8);
    let words =
        workshop.finetune("", "run", &[SET, &["optimizer.learning_rate=1e30", "data.order=longest_first"]].concat()).with(5);
    let is_told = |words: &str| words.contains("step 2: the loss ") && words.contains(" is not finite, in samples ");
    assert!(is_told(&words) && words.contains("lora_A.weight`"), "{words}");
    assert_eq!((workshop.checkpoints("run"), workshop.latest("run").as_str()), (vec!["step-000001".into()], "step-000001"));
    assert_valid(&workshop.path("run/step-000001"));
    assert!(is_told(&workshop.resume("", "run", &[]).with(5)));
}

#[test]
fn without_event_files_the_run_goes_on() {
    let (workshop, whole) = workshop_for_runs();
    assert_eq!(workshop.finetune("checkpoint.make_dir=kill:2", "run", SET).code, Err(9));
    fs::remove_dir_all(workshop.path("run/tensorboard")).unwrap();
    fs::write(workshop.path("run/tensorboard"), "in the way").unwrap();
    let words = workshop.resume("", "run", &[]).with(0);
    assert_eq!(words.matches("warning: no more TensorBoard events, the run goes on").count(), 1, "{words}");
    workshop.assert_left("run", whole);
}
