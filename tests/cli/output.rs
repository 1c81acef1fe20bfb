//! Where a run is written: nothing that lies there is touched, one process at a time, and a full disk loses nothing.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command as Process, Stdio};
use std::time::{Duration, Instant};

use insta::assert_snapshot;

use super::place::Place;
use crate::binary::kvtune;

/// Every file below a directory, by path.
fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(contents(&path));
        } else {
            found.insert(path.display().to_string(), fs::read(&path).unwrap());
        }
    }
    found
}

/// Every file of the finished checkpoints of `run`.
fn checkpoints(place: &Place) -> BTreeMap<String, Vec<u8>> {
    let dirs = place.names("run").into_iter().filter(|name| name.starts_with("step-") || name == "final" || name == "best");
    dirs.flat_map(|dir| contents(&place.path("run").join(dir))).collect()
}

#[test]
fn a_directory_with_something_in_it() {
    let place = Place::new();
    fs::create_dir(place.path("run")).unwrap();
    place.write("run/thesis.tex", "years of work");
    assert_snapshot!(place.finetune(&[]).refused(2), @r"
    error: the output directory `run` is not empty

    hint: choose another `--out`, or empty the directory
    ");
    assert_eq!(place.names("run"), ["thesis.tex"]);
    fs::remove_file(place.path("run/thesis.tex")).unwrap();
    place.finetune(&[]).done();
    let before = contents(&place.path("run"));
    assert_snapshot!(place.finetune(&[]).refused(2), @r"
    error: the output directory `run` is not empty

    hint: choose another `--out`, or go on with `kvtune resume run`
    ");
    assert_eq!(contents(&place.path("run")), before);
}

#[test]
fn a_place_that_is_no_directory() {
    let place = Place::new();
    place.write("run", "a file");
    assert_snapshot!(place.finetune(&[]).refused(1), @r"
    error: cannot make `run`
    cause: File exists (os error 17)

    hint: something else stands there: check whether a file or a directory is meant
    ");
    assert_eq!(place.read("run"), b"a file");
    let below = ["finetune-lora", "--recipe", "recipe.toml", "--device", "cpu", "--out", "run/below"];
    assert_snapshot!(place.run(&below).refused(1), @r"
    error: cannot make `run/below`
    cause: Not a directory (os error 20)

    hint: something else stands there: check whether a file or a directory is meant
    ");
}

#[test]
fn a_link() {
    let place = Place::new();
    fs::create_dir(place.path("real")).unwrap();
    std::os::unix::fs::symlink("real", place.path("run")).unwrap();
    assert_snapshot!(place.finetune(&[]).refused(2), @r"
    error: `run` is a symbolic link: expected a directory to write into

    hint: name the directory that the link points to
    ");
    assert!(place.names("real").is_empty());
}

#[test]
fn a_directory_in_use() {
    let place = Place::new();
    let mut first = kvtune();
    first.current_dir(place.path("")).stdout(Stdio::null()).stderr(Stdio::null());
    first.args(["finetune-lora", "--recipe", "recipe.toml", "--out", "run", "--device", "cpu", "--set", "train.epochs=1000000"]);
    let mut first = first.args(["--set", "train.max_steps=1000000"]).spawn().unwrap();
    let began = Instant::now();
    while !place.path("run/metrics.jsonl").exists() && began.elapsed() < Duration::from_secs(120) {
        std::thread::sleep(Duration::from_millis(50));
    }
    let number = first.id().to_string();
    let [again, resumed] = [place.finetune(&[]), place.run(&["resume", "run", "--device", "cpu"])];
    let stopped = Process::new("kill").args(["-TERM", &number]).status().unwrap();
    let ended = first.wait().unwrap();
    assert!(stopped.success());
    assert_eq!(ended.code(), Some(143));
    let again = again.refused(1).replace(&number, "<number>");
    assert_snapshot!(again, @r"
    error: `run` is in use by process <number>

    hint: wait until the other process has ended, stop it, or choose another place to write to
    ");
    assert_eq!(resumed.refused(1).replace(&number, "<number>"), again);
    place.run(&["resume", "run", "--device", "cpu", "--set", "train.max_steps=1"]).done();
}

#[test]
fn a_full_disk_while_saving_leaves_earlier_checkpoints_as_they_were() {
    let place = Place::new();
    place.finetune(&[]).done();
    let before = checkpoints(&place);
    assert_eq!(before.keys().filter(|name| name.ends_with("MANIFEST.json")).count(), 4, "three steps and the end");
    let more = ["resume", "run", "--device", "cpu", "--set", "train.epochs=2", "--set", "train.max_steps=4"];
    for strike in [
        "file.open=enospc:3",
        "file.write=enospc:2",
        "file.write=enospc:4",
        "file.sync=enospc:3",
        "dir.rename=enospc",
        "any=enospc:1",
    ] {
        let error = place.hear(place.command(&more).env("KVTUNE_FAILPOINT", strike)).refused(1);
        assert!(
            error.contains("\ncause: No space left on device (os error 28)\n\nhint: make room on that file system"),
            "{strike}: {error}"
        );
        assert!(error.contains("go on with `kvtune resume`; what was saved before is intact"), "{strike}: {error}");
        assert_eq!(checkpoints(&place), before, "{strike}");
    }
    place.run(&more).done();
    assert!(place.path("run/step-000004/MANIFEST.json").exists());
    assert!(!contents(&place.path("run")).keys().any(|name| name.contains(".tmp-")));
}

#[test]
fn a_full_disk_at_the_first_save() {
    let place = Place::new();
    let finetune = ["finetune-lora", "--device", "cpu", "--recipe", "recipe.toml", "--out", "run"];
    let said = place.hear(place.command(&finetune).env("KVTUNE_FAILPOINT", "file.write=enospc:4"));
    let error = said.refused(1);
    assert!(error.starts_with("error: cannot write `run/step-000001.tmp-"), "{error}");
    // The hint says to resume, and that is what helps.
    place.run(&["resume", "run", "--device", "cpu"]).done();
    assert!(place.path("run/final/MANIFEST.json").exists());
}

#[test]
fn results_that_cannot_be_written() {
    let place = Place::new();
    let said = |arguments: &[&str]| {
        let mut command = kvtune();
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        command.current_dir(place.path("")).args(arguments).stdout(full).stderr(Stdio::piped());
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    // A run is made to its end.
    let run = said(&["finetune-lora", "recipe.toml", "--out", "run", "--device", "cpu", "--format", "json"]);
    let error = "error: cannot write to standard output\ncause: No space left on device (os error 28)\n";
    assert!(run.contains("warning: cannot write to standard output: the run goes on") && run.contains(error), "{run}");
    assert!(place.path("run/final/MANIFEST.json").exists(), "{run}");
    assert_snapshot!(said(&["check", "--recipe", "recipe.toml"]).trim_end(), @r"
    error: cannot write to standard output
    cause: No space left on device (os error 28)

    hint: look at where the output goes, as that disk may be full, and ask again
    ");
}
