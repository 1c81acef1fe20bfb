//! `tests/device/run.sh` with tiny shapes on the CPU: the script itself works, whatever a GPU says.

use std::path::Path;
use std::process::Command;

use super::place::Place;

#[test]
fn the_script_makes_its_table_on_a_cpu() {
    if !Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: there is no `python3`");
        return;
    }
    let place = Place::new();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/device/run.sh");
    let mut command = Command::new(script);
    command.arg(env!("CARGO_BIN_EXE_kvtune")).args(["--device", "cpu", "--tiny", "--out"]).arg(place.path("out"));
    command.args(["doctor", "parity", "step-7b", "policies", "graphs"].iter().flat_map(|part| ["--only", part]));
    command.current_dir(place.path("model")).env("OMP_NUM_THREADS", "1").env_remove("OUT");
    let output = command.output().unwrap();
    let out = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{out}{}", String::from_utf8_lossy(&output.stderr));
    let table = String::from_utf8(place.read("out/table.md")).unwrap();
    assert!(out.contains(&table));
    let verdict = |what: &str| {
        let row =
            table.lines().find(|line| line.starts_with(&format!("| {what} "))).unwrap_or_else(|| panic!("{what}:\n{table}"));
        row.rsplit('|').nth(1).unwrap().trim().to_owned()
    };
    for (what, expected) in [
        ("doctor", "pass"),
        ("verify: gradient beside masked dense autograd, f64", "pass"),
        ("f32 beside the CPU's f32: worst matrix of the gradient", "pass"),
        ("f32 beside the CPU's f32: logits", "pass"),
        ("bf16 beside f32: cosine of the whole gradient", "pass"),
        ("two runs with `train.deterministic`: choices, logits, gradients", "pass"),
        ("Qwen2.5-7B, 131 072 tokens, h2o, C 16 384", "–"),
        ("h2o beside lastrec, C 16 384", "–"),
        ("CUDA graphs: loss beside the one without", "pass"),
        ("CUDA graphs, chunks of 256: forward", "–"),
    ] {
        assert_eq!(verdict(what), expected, "{what}:\n{table}");
    }
    assert!(!table.contains("FAIL") && !table.contains("not run"), "{table}");
}

#[test]
fn a_program_that_is_not_there_is_a_failure_in_every_part() {
    let place = Place::new();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/device/run.sh");
    let output = Command::new(script).args(["/nowhere/kvtune", "--quick", "--out"]).arg(place.path("out")).output();
    let Ok(output) = output.map(|output| String::from_utf8(output.stdout).unwrap()) else {
        eprintln!("skipped: the script cannot be started here");
        return;
    };
    if output.is_empty() {
        eprintln!("skipped: there is no `python3`");
        return;
    }
    let failed = output.lines().filter(|line| line.starts_with("| ") && line.ends_with("| FAIL    |")).count();
    assert_eq!(failed, 2, "{output}");
}
