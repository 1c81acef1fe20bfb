//! `tests/device/run.sh` with tiny shapes on the CPU: the script itself works, whatever a GPU says.

use std::path::Path;
use std::process::{Command, Output};

use super::place::Place;
use crate::starter;

/// The script, with the `kvtune` that arguments name; nothing where there is no Python to run it.
fn script(place: &Place, arguments: &[&str]) -> Option<Output> {
    if !Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: there is no `python3`");
        return None;
    }
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/device/run.sh"));
    command.args(arguments).arg("--out").arg(place.path("out"));
    command.current_dir(place.path("model")).env("OMP_NUM_THREADS", "1").env_remove("OUT").envs([starter::variable()]);
    Some(command.output().unwrap())
}

/// The last column of a row.
fn verdict(table: &str, what: &str) -> String {
    let row = table.lines().find(|line| line.starts_with(&format!("| {what} |")));
    row.unwrap_or_else(|| panic!("no row `{what}`:\n{table}")).rsplit('|').nth(1).unwrap().trim().to_owned()
}

/// Names of what lies under the folder that the script may write to.
fn left_behind(place: &Place) -> Vec<String> {
    let entries = std::fs::read_dir(place.path("out")).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn all_parts_come_to_their_end_on_a_cpu() {
    let place = Place::new();
    let kvtune = starter::in_place();
    let Some(output) = script(&place, &[kvtune.to_str().unwrap(), "--device", "cpu"]) else { return };
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{table}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(table.matches("| what | asked | seen | verdict |").count(), 1, "{table}");
    assert_eq!(left_behind(&place), ["device-ABCD.tar.xz"]);
    for (what, expected) in [
        ("shapes", "note"),
        ("doctor, cold", "pass"),
        ("doctor, warm", "pass"),
        ("ceilings", "skipped"),
        ("verify: gradient beside masked dense autograd, f64", "pass"),
        ("f32 beside the CPU's f32: worst matrix of the gradient", "pass"),
        ("f32 beside the CPU's f32: logits", "pass"),
        ("bf16 beside f32: cosine of the whole gradient", "pass"),
        ("bf16 beside f32: cosine of the whole gradient, a model with heads of 64", "pass"),
        ("two runs with `train.deterministic`: choices, logits, gradients", "pass"),
        ("Qwen2.5-7B, 131 072 tokens, h2o, C 16 384", "–"),
        ("Qwen2.5-7B, 131 072 tokens, h2o, C 16 384: seconds by part", "–"),
        ("h2o beside lastrec, C 16 384", "–"),
        ("slice", "skipped"),
        ("Qwen2.5-7B, 131 072 tokens, h2o, C 16 384, chunks of 2048", "–"),
        ("Qwen2.5-7B, 131 072 tokens, h2o, C 16 384, chunks of 2048, two a cell", "–"),
        ("Qwen3-4B's sizes, 2 × 65 536 tokens, h2o, C 32 768", "–"),
        ("sanitizer", "skipped"),
        ("Qwen2.5-7B, 524 288 tokens, int8 undo log", "–"),
        ("2 097 152 tokens in one step", "–"),
    ] {
        assert_eq!(verdict(&table, what), expected, "{what}:\n{table}");
    }
    // With a reason, where their program is not there or no GPU is.
    assert!(table.lines().any(|line| line.starts_with("| device tests") && line.ends_with("| skipped |")), "{table}");
    // What the program says beside its results.
    assert!(table.lines().any(|line| line.starts_with("| note of ")), "{table}");
    assert!(!table.contains("FAIL") && !table.contains("| not run |"), "{table}");
}

#[test]
fn what_is_named_is_run_alone() {
    let place = Place::new();
    let arguments = [env!("CARGO_BIN_EXE_kvtune"), "--device", "cpu", "--only", "machine,ceilings", "--only", "sanitizer"];
    let Some(output) = script(&place, &arguments) else { return };
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && !table.contains("doctor"), "{table}");
    assert_eq!(verdict(&table, "ceilings"), "skipped");
    assert!(table.contains("it needs a GPU") && table.contains("| processor |"), "{table}");
    assert_eq!(left_behind(&place), ["device-machine-ceilings-sanitizer.tar.xz"]);
}

#[test]
fn a_program_that_is_not_there_is_said_at_once() {
    let place = Place::new();
    let Some(output) = script(&place, &["/nowhere/kvtune", "--only", "a"]) else { return };
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains("there is no program `/nowhere/kvtune`") && output.stdout.is_empty(), "{told}");
}

#[test]
fn a_program_that_fails_is_a_failure_of_each_thing_that_asks_it_and_the_rest_goes_on() {
    let place = Place::new();
    let Some(output) = script(&place, &["/bin/false", "--device", "cpu"]) else { return };
    let table = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{table}");
    for what in ["doctor, cold", "doctor, warm", "parity", "step-7b", "lastrec", "slice", "step-4b", "lengths", "2m"] {
        assert_eq!(verdict(&table, what), "FAIL", "{what}:\n{table}");
    }
    assert_eq!(left_behind(&place), ["device-ABCD.tar.xz"]);
}
