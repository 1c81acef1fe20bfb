//! Files that are none: pipes, sockets, devices, directories, links that lead nowhere, names that are too long; wherever a file is read.

use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;

use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::case::{Case, hold};
use super::ground::Ground;

pub(super) const KINDS: [&str; 6] = ["pipe", "socket", "device", "directory", "loop", "dangling"];

/// Puts something else in a file's place.
pub(super) fn instead(place: &Ground, name: &str, kind: &str) {
    let path = place.path(name);
    if path.symlink_metadata().is_ok() {
        place.remove(name);
    }
    match kind {
        "pipe" => mknodat(CWD, &path, FileType::Fifo, Mode::from(0o600), 0).unwrap(),
        "socket" => drop(UnixListener::bind(&path).unwrap()),
        "device" => symlink("/dev/zero", &path).unwrap(),
        "directory" => std::fs::create_dir(&path).unwrap(),
        "loop" => symlink(&path, &path).unwrap(),
        _ => symlink("absent", &path).unwrap(),
    }
}

/// A file in whose place a pipe stands and every other one of the other kinds, and what else it needs. One door opens all files: what matters
/// is that each comes through it.
fn each(name: &'static str, prepare: fn(&Ground), code: i32, arguments: &'static [&'static str]) -> Vec<Case> {
    let last = name.rsplit('/').next().unwrap();
    let of = |kind: &'static str| {
        let make = move |place: &Ground| {
            prepare(place);
            instead(place, name, kind);
        };
        Case::new(format!("a {kind} as {name}"), make).run(arguments).code(code).says(&[last])
    };
    let others = KINDS[1..].iter().skip(name.len() % 2).step_by(2);
    KINDS[..1].iter().chain(others).map(|kind| of(kind)).collect()
}

const CHECK: &[&str] = &["check", "--recipe", "recipe.toml"];
const RESUME: &[&str] = &["resume", "run"];

/// Of files that need not be there: a link to nothing means that they are not.
fn what_is_there(cases: Vec<Case>) -> impl Iterator<Item = Case> {
    cases.into_iter().filter(|case| !case.is_named("loop") && !case.is_named("dangling"))
}

#[test]
fn a_model() {
    hold(each("model/config.json", |_| (), 3, CHECK));
    hold(each("model/model.safetensors", |_| (), 3, CHECK));
    hold(each("model/tokenizer.json", Ground::with_texts, 3, CHECK));
    hold(what_is_there(each("model/tokenizer_config.json", Ground::with_messages, 3, CHECK)));
    hold(what_is_there(each("model/generation_config.json", Ground::with_texts, 3, CHECK)));
    hold(what_is_there(each("model/model.safetensors.index.json", |place| place.remove("model/model.safetensors"), 3, CHECK)));
    hold(
        KINDS
            .iter()
            .filter(|&&kind| kind != "directory")
            .map(|&kind| Case::new(format!("a {kind} as a model"), move |place| instead(place, "model", kind)).says(&["model"])),
    );
}

#[test]
fn shards_of_a_model() {
    let sharded = |place: &Ground| {
        let index = "{\"weight_map\": {\"model.norm.weight\": \"a.safetensors\"}}";
        place.remove("model/model.safetensors");
        place.write("model/model.safetensors.index.json", index);
    };
    hold(each("model/a.safetensors", sharded, 3, CHECK));
}

#[test]
fn an_adapter() {
    hold(each("adapter/adapter_config.json", Ground::with_adapter, 3, CHECK));
    hold(each("adapter/adapter_model.safetensors", Ground::with_adapter, 3, CHECK));
}

#[test]
fn data_and_a_recipe() {
    hold(each("train.jsonl", |_| (), 3, CHECK).into_iter().filter(|case| !case.is_named("directory")));
    let validated = |place: &Ground| {
        place.edit_recipe("validation_fraction = 0", "validation = \"held.jsonl\"");
    };
    hold(what_is_there(each("held.jsonl", validated, 3, CHECK)).filter(|case| !case.is_named("directory")));
    hold(each("recipe.toml", |_| (), 2, CHECK));
}

#[test]
fn a_run() {
    let from: &[&str] = &["resume", "run", "--from", "step-000001"];
    for name in ["MANIFEST.json", "state.json", "optimizer.safetensors", "adapter_model.safetensors"] {
        let name: &'static str = Box::leak(format!("run/step-000001/{name}").into_boxed_str());
        hold(what_is_there(each(name, Ground::with_run, 3, from)));
    }
    // A record of the run's own, and a file that is read.
    hold(what_is_there(each("run/metrics.jsonl", Ground::with_unfinished_run, 1, RESUME)).map(|case| case.or_code(3)));
    hold(what_is_there(each("run/recipe.resolved.toml", Ground::with_run, 3, RESUME)));
}

#[test]
fn what_other_commands_read() {
    hold(what_is_there(each("answers.jsonl", |_| (), 3, &["score", "answers.jsonl", "--metrics", "f1"])));
    hold(what_is_there(each("log.kvlog", |_| (), 3, &["inspect", "--evictions", "log.kvlog"])));
    hold(what_is_there(each("prompt.txt", |_| (), 2, &["generate", "model", "--prompt-file", "prompt.txt"])));
    hold(what_is_there(each("key.txt", |_| (), 3, &["serve", "model", "--port", "0", "--api-key-file", "key.txt"])));
}

/// Names that are longer than a file system takes, and paths that are longer than the system takes.
#[test]
fn names_too_long() {
    let named = |what: &str, name: String, arguments: [&str; 4], code: i32| {
        let arguments: Vec<String> = arguments.iter().map(|part| part.replace("NAME", &name)).collect();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        Case::new(format!("{what} of {} characters", name.len()), |_| ()).run(&arguments).code(code).says(&["long"])
    };
    for name in ["n".repeat(256), "path/".repeat(1000)] {
        hold([
            named("a recipe", name.clone(), ["check", "--recipe", "NAME", "--threads=1"], 2),
            named("a model", name.clone(), ["check", "--recipe=recipe.toml", "--set", "model.path=NAME"], 3),
            named("data", name.clone(), ["check", "--recipe=recipe.toml", "--set", "data.train=NAME"], 3),
            named("an adapter", name.clone(), ["check", "--recipe=recipe.toml", "--set", "model.adapter=NAME"], 3),
            named("a run", name.clone(), ["finetune-lora", "--recipe=recipe.toml", "--out", "NAME"], 1),
        ]);
    }
    hold([Case::new("no name for a run", |_| ())
        .run(&["finetune-lora", "--recipe", "recipe.toml", "--out", ""])
        .code(2)
        .says(&["--out"])]);
}

/// A file of tokens that is none is made anew.
#[test]
fn tokens_that_are_kept() {
    hold(KINDS.map(|kind| {
        let make = move |place: &Ground| {
            let kept = place.kept_tokens();
            instead(place, &kept, kind);
        };
        Case::new(format!("a {kind} as a file of tokens"), make).code(0)
    }));
}
