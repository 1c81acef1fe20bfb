//! Runs whose stores are files: they leave what runs in memory leave and nothing else, and end in good order where the disk is full.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;

use super::workshop::{Workshop, ended, finetune_arguments, names, wait_for_stop};

const STEPS: [&str; 4] =
    ["train.max_steps=3", "train.gradient_accumulation_steps=1", "eval.interval=100", "grad.keep_graph=none"];
const FILES: [&str; 2] = ["grad.layer_checkpoints_place=file", "grad.undo_log_place=file"];

fn in_files() -> Vec<&'static str> {
    [&STEPS[..], &FILES].concat()
}

/// How many files without a name a process has open in a directory.
fn num_unnamed(process: &Child, dir: &Path) -> usize {
    let open = fs::read_dir(format!("/proc/{}/fd", process.id())).unwrap().map(|entry| entry.unwrap().path());
    let is_unnamed = |file: PathBuf| {
        file.read_link().is_ok_and(|target| target.starts_with(dir) && target.to_string_lossy().ends_with(" (deleted)"))
    };
    open.map(is_unnamed).filter(|is_unnamed| *is_unnamed).count()
}

#[test]
fn a_run_in_files_leaves_what_one_in_memory_does_and_no_scratch() {
    let workshop = Workshop::new(8);
    let whole = workshop.finished("memory", &STEPS);
    workshop.finetune("", "files", &in_files()).with(0);
    workshop.assert_left("files", &whole);
    // Another place for them, which is there before and stays.
    let dir = workshop.path("fast");
    fs::create_dir(&dir).unwrap();
    let elsewhere = [&in_files()[..], &["grad.scratch_dir=fast"]].concat();
    let child = workshop.command("metrics.write=stop:4", &finetune_arguments("elsewhere", &elsewhere)).spawn().unwrap();
    wait_for_stop(&child);
    assert_eq!((num_unnamed(&child, &dir), num_unnamed(&child, &workshop.path("elsewhere"))), (2, 0));
    assert_eq!(names(&dir), [""; 0]);
    super::workshop::send(&child, rustix::process::Signal::CONT);
    ended(child).with(0);
    workshop.assert_left("elsewhere", &whole);
    assert!(dir.exists());
}

#[test]
fn a_killed_run_leaves_no_scratch() {
    let workshop = Workshop::new(8);
    let whole = workshop.finished("whole", &STEPS);
    fs::create_dir(workshop.path("shared")).unwrap();
    for (run, further) in [("own", None), ("shared-one", Some("grad.scratch_dir=shared"))] {
        let sets: Vec<_> = in_files().into_iter().chain(further).collect();
        assert_eq!(workshop.finetune("scratch.write=kill:20", run, &sets).code, Err(9));
        let left = [names(&workshop.path(run)), names(&workshop.path("shared"))].concat();
        assert!(!left.iter().any(|name| name.contains("scratch")), "{left:?}");
        workshop.resume("", run, &[]).with(0);
        workshop.assert_left(run, &whole);
    }
    assert_eq!(names(&workshop.path("shared")), [""; 0]);
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
        workshop.resume("", &run, &[]).with(0);
        workshop.assert_left(&run, &whole);
    }
    // Where room can't be reserved ahead, the write meets the full disk: in the first step, in the last.
    for (number, nth) in [3, 40].into_iter().enumerate() {
        let run = format!("written-{number}");
        let words = workshop.finetune(&format!("scratch.write=enospc:{nth}"), &run, &in_files()).with(1);
        assert!(words.contains("error: cannot write to a scratch file in `") && words.contains("hint: make room"), "{words}");
        workshop.resume("", &run, &[]).with(0);
        workshop.assert_left(&run, &whole);
    }
    let words = workshop.finetune("scratch.read=eio:5", "unread", &in_files()).with(1);
    assert!(words.contains("cannot read back a scratch file in `"), "{words}");
    workshop.resume("", "unread", &[]).with(0);
    workshop.assert_left("unread", &whole);
}
