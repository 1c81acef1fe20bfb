//! Limits of the process: sizes of files, address space, open files, threads; and what an environment may say.

use super::case::{Case, hold};
use super::ground::Ground;

const TRAIN: &[&str] = &["finetune-lora", "--recipe", "recipe.toml", "--out", "run"];

#[test]
fn sizes_and_numbers() {
    hold([
        // In blocks of 512 bytes. The run begins, and its first save finds no room: what it leaves is what it had.
        Case::new("no file above 8 KiB", |_: &Ground| ()).run(TRAIN).ulimit("-f 16").code(1).leaves("run"),
        // What the libraries take by being mapped the loader must have, or it ends the process itself.
        Case::new("too few addresses", |_: &Ground| ()).short_of(64 << 10).code(4).says(&["ulimit -v"]),
        Case::new("12 open files", |_: &Ground| ()).run(TRAIN).ulimit("-n 12").code(4).says(&["ulimit -n"]),
    ]);
}

#[test]
fn threads() {
    let threads = |number: &str, code: i32| {
        Case::new(format!("{number} threads"), |_: &Ground| ())
            .run(&["check", "--recipe", "recipe.toml", "--threads", number])
            .code(code)
    };
    hold([threads("65535", 2), threads("4096", 2), threads("0", 2), threads("-1", 2), threads("99999999999", 2)]);
}
