//! Whatever an argument names as a place may be something else: each command refuses each kind in words, and waits for nobody.

use std::os::unix::fs::symlink;

use super::case::{Case, hold};
use super::ground::Ground;
use super::special::{KINDS, instead};

/// What may stand where an argument leads, beside [`KINDS`]: nothing, and nothing that could be there.
const MORE: [&str; 2] = ["missing", "long"];

/// Commands that read a run, a checkpoint or a file; `PLACE` is where.
const COMMANDS: [&[&str]; 9] = [
    &["inspect", "PLACE"],
    &["report", "PLACE"],
    &["resume", "PLACE"],
    &["evaluate", "PLACE", "--split", "train"],
    &["export", "PLACE", "--for", "peft"],
    &["generate", "PLACE", "--prompt-tokens", "5"],
    &["generate", "model", "--session", "PLACE", "--prompt-tokens", "5"],
    &["verify", "--conformance", "PLACE"],
    &["init-model", "--config", "PLACE", "--out", "new"],
];

#[test]
fn seventy_two_places() {
    let mut cases = Vec::new();
    for arguments in COMMANDS {
        for kind in KINDS.into_iter().chain(MORE) {
            let name = if kind == "long" { "n".repeat(5000) } else { "place".to_owned() };
            let named: Vec<&str> = arguments.iter().map(|part| if *part == "PLACE" { &name[..] } else { part }).collect();
            let make = move |ground: &Ground| {
                if !MORE.contains(&kind) {
                    instead(ground, "place", kind);
                }
            };
            cases.push(
                Case::new(format!("{}: {kind}", arguments[..2].join(" ")), make).run(&named).or_code(2).says(&[&name[..5]]),
            );
        }
    }
    assert_eq!(cases.len(), 72);
    hold(cases);
}

/// What a run would replace at its end must be its own.
#[test]
fn links_in_the_place_of_checkpoints() {
    let linked = |what: &str, name: &'static str, make: fn(&Ground)| {
        let spoil = move |ground: &Ground| {
            ground.with_unfinished_run();
            make(ground);
        };
        Case::new(format!("{what} as {name}"), spoil).run(&["resume", "run"]).code(2).says(&[name, "symbolic link"])
    };
    let loops = |ground: &Ground| symlink("final", ground.path("run/final")).unwrap();
    let away = |ground: &Ground| {
        std::fs::create_dir(ground.path("elsewhere")).unwrap();
        ground.write("elsewhere/kept", "");
        symlink("../elsewhere", ground.path("run/best")).unwrap();
    };
    hold([linked("a link in a circle", "run/final", loops), linked("a link to a directory", "run/best", away)]);
}
