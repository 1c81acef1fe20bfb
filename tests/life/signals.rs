//! Signals, second processes and unsuitable places: a run ends in good order, or does not begin.

use std::fs;
use std::process::Child;

use rustix::process::Signal;

use super::workshop::{Left, Workshop, ended, finetune_arguments, names, send, wait_for_stop};

/// Five steps, of which none is saved but the best and the last.
const SET: &[&str] = &[
    "train.max_steps=5",
    "train.gradient_accumulation_steps=1",
    "eval.interval=100",
    "checkpoint.save_interval=100",
    "checkpoint.intermediate_save_interval=100",
];

fn workshop() -> (Workshop, Left) {
    let workshop = Workshop::new(8);
    let whole = workshop.finished("whole", SET);
    assert_eq!(workshop.checkpoints("whole"), ["best", "final", "step-000005"]);
    (workshop, whole)
}

/// A run that has stopped itself in its third step, at the line of metrics; the first line is that of the validation before.
fn stopped_in_step_3(workshop: &Workshop, run: &str) -> Child {
    let child = workshop.command("metrics.write=stop:4", &finetune_arguments(run, SET)).spawn().unwrap();
    wait_for_stop(&child);
    child
}

#[test]
fn the_first_signal_ends_the_run_after_its_step_and_a_save() {
    let (workshop, whole) = workshop();
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let run = code.to_string();
        let child = stopped_in_step_3(&workshop, &run);
        send(&child, signal);
        send(&child, Signal::CONT);
        let words = ended(child).with(code);
        assert!(words.contains(&format!("interrupted; go on with `kvtune resume {run}`")), "{words}");
        assert_eq!((workshop.checkpoints(&run), workshop.latest(&run)), (vec!["step-000003".into()], "step-000003".into()));
        let summary = fs::read_to_string(workshop.path(&run).join("summary.md")).unwrap();
        assert!(summary.contains("interrupted after step 3"), "{summary}");
        assert!(workshop.resume("", &run, &[]).with(0).contains("resuming after step 3"));
        let found = workshop.left(&run);
        assert_eq!(found.metrics, whole.metrics);
        for (name, bytes) in &whole.files {
            assert!(found.files[name] == *bytes, "{run}: `{name}` differs");
        }
    }
}

#[test]
fn an_interrupted_run_tells_its_memory() {
    let workshop = Workshop::new(8);
    let arguments = [&finetune_arguments("run", SET)[..], &["--profile-memory"]].concat();
    let child = workshop.command("metrics.write=stop:4", &arguments).spawn().unwrap();
    wait_for_stop(&child);
    send(&child, Signal::INT);
    send(&child, Signal::CONT);
    let ended = ended(child);
    assert_eq!(ended.code, Ok(130), "{}", ended.stderr);
    let summary = fs::read_to_string(workshop.path("run/summary.md")).unwrap();
    for text in [&ended.stdout, &summary] {
        assert!(text.contains("most memory (process) of all steps: in step ") && text.contains("| measured peak"), "{text}");
    }
}

#[test]
fn the_second_signal_ends_the_run_at_once() {
    let (workshop, whole) = workshop();
    let child = stopped_in_step_3(&workshop, "run");
    // Two of a kind that wait for a stopped process are one.
    send(&child, Signal::TERM);
    send(&child, Signal::INT);
    send(&child, Signal::CONT);
    let ended = ended(child);
    assert!([Ok(130), Ok(143)].contains(&ended.code), "{ended:?}");
    assert!(!ended.stderr.contains("interrupted"), "no good order: {}", ended.stderr);
    // Each signal comes to some thread: before the second one's has a turn, the loop may have saved for the first.
    let begins = if workshop.checkpoints("run").is_empty() { "beginning again" } else { "resuming after step 3" };
    assert!(workshop.resume("", "run", &[]).with(0).contains(begins));
    workshop.assert_left("run", &whole);
}

#[test]
fn one_process_has_the_directory() {
    let (workshop, whole) = workshop();
    let child = stopped_in_step_3(&workshop, "run");
    let holder = format!("`run` is in use by process {}", child.id());
    for second in [workshop.resume("", "run", &[]), workshop.finetune("", "run", SET)] {
        let words = second.with(1);
        assert!(words.contains(&holder) && words.contains("hint:"), "{words}");
    }
    send(&child, Signal::CONT);
    ended(child).with(0);
    workshop.assert_left("run", &whole);
}

#[test]
fn two_that_begin_at_once_do_not_write_over_each_other() {
    let (workshop, whole) = workshop();
    // Both find an empty place; the second to take the lock must look again.
    let begin = || workshop.command("", &finetune_arguments("run", SET)).spawn().unwrap();
    let both = [begin(), begin()].map(ended);
    let mut codes = [0, 1].map(|i| both[i].code.unwrap());
    codes.sort_unstable();
    assert!(codes == [0, 1] || codes == [0, 2], "{both:?}");
    workshop.assert_left("run", &whole);
}

#[test]
fn a_lock_of_a_dead_process_holds_nobody() {
    let (workshop, whole) = workshop();
    fs::create_dir(workshop.path("run")).unwrap();
    fs::write(workshop.path("run").join(".lock"), "1\n").unwrap();
    workshop.finetune("", "run", SET).with(0);
    workshop.assert_left("run", &whole);
}

#[test]
fn what_cannot_begin_leaves_nothing_behind() {
    let workshop = Workshop::new(4);
    for set in ["data.train=absent.jsonl", "model.path=absent", "kv_cache.chunk_size=4000", "lora.target_modules=[\"wq\"]"] {
        let ended = workshop.finetune("", "run", &[set]);
        assert!(ended.code == Ok(2) || ended.code == Ok(3) || ended.code == Ok(1), "{ended:?}");
        assert!(ended.stderr.contains("hint:") && !workshop.path("run").exists(), "{ended:?}");
    }
    fs::create_dir(workshop.path("mine")).unwrap();
    fs::write(workshop.path("mine").join("thesis.md"), "years of work").unwrap();
    let words = workshop.finetune("", "mine", &[]).with(2);
    assert!(words.contains("`mine` is not empty"), "{words}");
    std::os::unix::fs::symlink("mine", workshop.path("link")).unwrap();
    let words = workshop.finetune("", "link", &[]).with(2);
    assert!(words.contains("`link` is a symbolic link"), "{words}");
    let words = workshop.finetune("", "recipe.toml", &[]).with(1);
    assert!(words.contains("recipe.toml`"), "{words}");
    assert_eq!(names(&workshop.path("mine")), ["thesis.md"]);
}
