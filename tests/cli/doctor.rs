//! What `kvtune doctor` says of a machine: the rows, their order and keys, and that what is not promised is no failure.

use insta::assert_snapshot;
use serde_json::Value;

use super::place::{Place, Said};

/// With numbers, paths and names of this machine's CPU left out.
fn plain(line: &str) -> String {
    let cells: Vec<&str> = line.trim_matches(['|', ' ']).split('|').map(str::trim).collect();
    let mut found = cells.get(2).copied().unwrap_or_default().to_owned();
    if let Some((_, rest)) = found.split_once(" threads at work").filter(|_| cells[0] == "CPU") {
        found = format!("<units>; <n> of <n> threads at work{rest}");
    }
    // Between two backticks; it may have blanks.
    let quoted = found.split('`').enumerate();
    let quoted = quoted.map(|(at, part)| if at % 2 == 1 && part.contains('/') { "<path>" } else { part });
    found = quoted.collect::<Vec<_>>().join("`").replace("`<path>`", "<path>");
    let is_of_number = |c: char| c.is_ascii_digit() || c == '.';
    let mut words: Vec<String> = found.split(' ').map(ToOwned::to_owned).collect();
    for word in &mut words {
        let bare = word.trim_end_matches([',', ';']);
        let end = &word[bare.len()..];
        if bare.starts_with(|c: char| c.is_ascii_digit()) && bare.chars().all(|c| is_of_number(c) || "e-".contains(c)) {
            *word = format!("<n>{end}");
        } else if ["B", "KiB", "MiB", "GiB", "TiB"].contains(&bare) {
            *word = format!("<unit>{end}");
        }
    }
    format!("{} | {} | {}", cells[0], cells.get(1).unwrap_or(&""), words.join(" "))
}

fn table(said: &Said) -> String {
    let rows = said.out.lines().filter(|line| line.starts_with('|') && !line.starts_with("|-"));
    rows.map(plain).collect::<Vec<_>>().join("\n")
}

fn lines(said: &Said) -> Vec<Value> {
    said.out.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

fn has_device() -> bool {
    let nodes = std::fs::read_dir("/dev").into_iter().flatten().flatten().map(|entry| entry.file_name());
    nodes.map(|name| name.to_string_lossy().into_owned()).any(|name| name.starts_with("nvidia") || name == "dxg")
}

#[test]
fn of_the_cpu_alone() {
    assert_snapshot!(table(&Place::new().run(&["doctor", "--device", "cpu"]).done()), @r"
    what | state | found
    libtorch | ok | <n>, <path>
    CPU | ok | <units>; <n> of <n> threads at work
    CPU product | ok | f32: error <n>; bf16: error <n>
    CPU attention | ok | kvtune's CPU kernel in f32, kvtune's CPU kernel in bf16
    host memory | ok | <n> <unit> for this process
    scratch space | ok | <n> <unit> free in `.`
    CUDA | missing | not asked for: `--device cpu`
    ");
}

#[test]
fn json_has_the_same_rows_and_stable_keys() {
    let said = Place::new().run(&["doctor", "--device", "cpu", "--threads", "1", "--json"]).done();
    let lines = lines(&said);
    let (summary, checks) = lines.split_last().unwrap();
    assert_eq!(summary.to_string(), r#"{"kind":"summary","promised":"cpu","ok":6,"missing":1,"failed":0}"#);
    let keys = |line: &Value| {
        let mut keys: Vec<&str> = line.as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        keys.join(" ")
    };
    assert!(checks.iter().all(|check| keys(check) == "found hint kind name state"), "{}", said.out);
    let names: Vec<&str> = checks.iter().map(|check| check["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["libtorch", "CPU", "CPU product", "CPU attention", "host memory", "scratch space", "CUDA"]);
    assert!(checks[1]["found"].as_str().unwrap().ends_with("; 1 of 1 threads at work"), "{}", said.out);
}

#[test]
fn without_a_gpu_cuda_is_missing_and_no_failure() {
    if has_device() {
        eprintln!("skipped: this machine has an NVIDIA device, and `tests/device` looks at it");
        return;
    }
    let said = Place::new().run(&["doctor", "--format", "json"]).done();
    let lines = lines(&said);
    let state =
        |name: &str| lines.iter().find(|line| line["name"] == name).map(|line| line["state"].as_str().unwrap().to_owned());
    for name in ["NVIDIA devices", "libtorch's CUDA half", "GPU product", "GPU attention", "GPU kernels", "CUDA graphs"] {
        assert_eq!(state(name).as_deref(), Some("missing"), "{name}: {}", said.out);
    }
    assert_eq!(lines.last().unwrap()["promised"], "cpu");
}

#[test]
fn what_is_asked_for_and_not_there_is_a_failure() {
    if has_device() {
        eprintln!("skipped: this machine has an NVIDIA device, and `tests/device` looks at it");
        return;
    }
    let said = Place::new().run(&["doctor", "--device", "cuda"]);
    let hint = "NVIDIA devices: CUDA needs an NVIDIA GPU; a container must be given it when it is started\n";
    assert!(said.out.contains(hint), "{}", said.out);
    let error = said.refused(1);
    let (error, hint) = error.split_once("\n\n").unwrap();
    assert!(error.starts_with("error: promised here, and not working: `NVIDIA devices`, `driver`"), "{error}");
    assert!(error.ends_with("`CUDA graphs`"), "{error}");
    assert_snapshot!(hint, @"hint: the lines above say what to do; `--device cpu` works without CUDA, and `kvtune doctor --device cpu` looks without it");
}

#[test]
fn a_scratch_place_that_is_not_there() {
    let said = Place::new().run(&["doctor", "--device", "cpu", "--scratch-dir", "nowhere"]);
    assert!(said.out.contains("scratch space: name a directory that exists with `--scratch-dir`"), "{}", said.out);
    assert!(said.refused(1).starts_with("error: promised here, and not working: `scratch space`"));
}
