//! Files that are shortened while a run has them as memory: one line and exit 3, where the system would kill the process.

use std::fs::{self, OpenOptions};
use std::path::Path;

use rustix::process::Signal;

use super::workshop::{Workshop, copy_dir, ended, finetune_arguments, names, send, wait_for_stop};

#[test]
fn a_file_that_is_shortened_under_a_run_is_named() {
    let workshop = Workshop::new(8);
    copy_dir(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2"), &workshop.path("model"));
    for run in ["weights", "tokens"] {
        let set = ["model.path=model", "train.max_steps=3", "eval.initial=false"];
        let child = workshop.command("run.step=stop:2", &finetune_arguments(run, &set)).spawn().unwrap();
        wait_for_stop(&child);
        let name = if run == "weights" {
            "model/model.safetensors".to_owned()
        } else {
            format!("train.jsonl.tokens/{}", names(&workshop.path("train.jsonl.tokens"))[0])
        };
        let path = workshop.path(&name);
        let whole = fs::read(&path).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(0).unwrap();
        send(&child, Signal::CONT);
        let words = ended(child).with(3);
        let line = format!("{name}` can't be read any more: it was shortened while it was in use");
        assert!(words.contains(&line) && words.contains("hint: restore the file"), "{words}");
        fs::write(&path, whole).unwrap();
        workshop.resume("", run, &[]).with(0);
    }
}
