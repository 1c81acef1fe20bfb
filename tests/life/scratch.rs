//! Runs whose stores are files: they leave what runs in memory leave, clean up after themselves and others, and end in good order where
//! the disk is full.

use std::fs;

use super::workshop::{Workshop, ended, finetune_arguments, names, wait_for_stop};

const STEPS: [&str; 4] =
    ["train.max_steps=3", "train.gradient_accumulation_steps=1", "eval.interval=100", "grad.keep_graph=none"];
const FILES: [&str; 2] = ["grad.layer_checkpoints_place=file", "grad.undo_log_place=file"];

fn in_files() -> Vec<&'static str> {
    [&STEPS[..], &FILES].concat()
}

#[test]
fn a_run_in_files_leaves_what_one_in_memory_does_and_no_scratch() {
    let workshop = Workshop::new(8);
    let whole = workshop.finished("memory", &STEPS);
    workshop.finetune("", "files", &in_files()).with(0);
    workshop.assert_left("files", &whole);
    assert!(!workshop.path("files/scratch").exists());
    // Another place for them, which was there before and stays.
    fs::create_dir(workshop.path("fast")).unwrap();
    let elsewhere = [&in_files()[..], &["grad.scratch_dir=fast"]].concat();
    let child = workshop.command("metrics.write=stop:4", &finetune_arguments("elsewhere", &elsewhere)).spawn().unwrap();
    wait_for_stop(&child);
    assert_eq!(names(&workshop.path("fast")).len(), 2);
    assert!(!workshop.path("elsewhere/scratch").exists());
    super::workshop::send(&child, rustix::process::Signal::CONT);
    ended(child).with(0);
    workshop.assert_left("elsewhere", &whole);
    assert_eq!(names(&workshop.path("fast")), [""; 0]);
}

#[test]
fn what_a_killed_run_left_is_removed_at_the_next_start_and_never_what_a_living_one_uses() {
    let workshop = Workshop::new(8);
    let whole = workshop.finished("whole", &STEPS);
    let shared = [&in_files()[..], &["grad.scratch_dir=shared"]].concat();
    let living = workshop.command("metrics.write=stop:4", &finetune_arguments("living", &shared)).spawn().unwrap();
    wait_for_stop(&living);
    let its = names(&workshop.path("shared"));
    assert!(its.len() == 2 && its.iter().all(|name| name.contains(&living.id().to_string())), "{its:?}");

    assert_eq!(workshop.finetune("scratch.write=kill:20", "killed", &shared).code, Err(9));
    assert!(names(&workshop.path("shared")).len() > 2);
    workshop.resume("", "killed", &[]).with(0);
    workshop.assert_left("killed", &whole);
    assert_eq!(names(&workshop.path("shared")), its);

    // In the run's own directory also by a start that makes no files.
    assert_eq!(workshop.finetune("scratch.write=kill:20", "own", &in_files()).code, Err(9));
    assert!(!names(&workshop.path("own/scratch")).is_empty());
    let in_memory = ["--set", "grad.layer_checkpoints_place=memory", "--set", "grad.undo_log_place=memory"];
    workshop.resume("", "own", &in_memory).with(0);
    workshop.assert_left("own", &whole);
    assert!(!workshop.path("own/scratch").exists());

    super::workshop::send(&living, rustix::process::Signal::CONT);
    ended(living).with(0);
    workshop.assert_left("living", &whole);
    assert!(!workshop.path("shared").exists());
}

#[test]
fn a_full_disk_ends_the_run_in_good_order() {
    let workshop = Workshop::new(8);
    let whole = workshop.finished("whole", &STEPS);
    // One file is for each store; the second is met inside a layer.
    for (number, failpoint) in ["scratch.reserve=enospc:1+", "scratch.reserve=enospc:2+"].into_iter().enumerate() {
        let run = format!("full-{number}");
        let words = workshop.finetune(failpoint, &run, &in_files()).with(1);
        assert!(words.contains("error: the scratch files in `") && words.contains(" are free there"), "{words}");
        assert!(words.contains("hint: make room") && words.contains("`grad.scratch_dir`"), "{words}");
        assert!(!workshop.path(&run).join("scratch").exists());
        workshop.resume("", &run, &[]).with(0);
        workshop.assert_left(&run, &whole);
    }
    // Where room can't be reserved ahead, the write meets the full disk: in the first step, in the last.
    for (number, nth) in [3, 40].into_iter().enumerate() {
        let run = format!("written-{number}");
        let words = workshop.finetune(&format!("scratch.write=enospc:{nth}"), &run, &in_files()).with(1);
        assert!(
            words.contains("error: cannot write `") && words.contains(".scratch`") && words.contains("hint: make room"),
            "{words}"
        );
        assert!(!workshop.path(&run).join("scratch").exists());
        workshop.resume("", &run, &[]).with(0);
        workshop.assert_left(&run, &whole);
    }
    let words = workshop.finetune("scratch.read=eio:5", "unread", &in_files()).with(1);
    assert!(words.contains("cannot read back `"), "{words}");
    workshop.resume("", "unread", &[]).with(0);
    workshop.assert_left("unread", &whole);
}
