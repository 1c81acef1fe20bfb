//! Runs of the binary on a tiny model, and what they leave on disk.
#![allow(unreachable_pub, reason = "what is public here is so for the tests beside it")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use tempfile::TempDir;

use crate::binary::kvtune;
use crate::starter;

/// 12 steps of ragged sequences with dropout and accumulation; every step is saved, every fifth validated.
const RECIPE: &str = r#"
[model]
path = "MODEL"
[lora]
r = 2
alpha = 4
dropout = 0.1
target_modules = ["q_proj", "v_proj", "down_proj"]
[data]
format = "tokens"
train = "train.jsonl"
validation = "validation.jsonl"
[kv_cache]
policy = "h2o"
cache_length = 16
chunk_size = 4
[train]
micro_batch_size = 2
gradient_accumulation_steps = 2
epochs = 4
max_steps = 12
seed = 7
[optimizer]
learning_rate = 1e-2
[eval]
interval = 5
initial = true
[checkpoint]
save_interval = 4
intermediate_save_interval = 1
intermediate_save_keep = 20
"#;

/// A folder with data and a recipe, in which runs are made.
pub struct Workshop {
    dir: TempDir,
}

/// How a process ended, and what it said.
#[derive(Debug)]
pub struct Ended {
    /// `Err` is the signal that killed it.
    pub code: Result<i32, i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    /// Asserts the exit code and hands the words on standard error over.
    #[track_caller]
    pub fn with(self, code: i32) -> String {
        assert_eq!(self.code, Ok(code), "{}", self.stderr);
        self.stderr
    }
}

/// Everything that a run must leave to the bit: the files of its checkpoints, and its metrics without times.
#[derive(PartialEq)]
pub struct Left {
    pub files: BTreeMap<String, Vec<u8>>,
    pub metrics: Vec<Value>,
}

impl Workshop {
    /// Ragged samples, and the recipe beside them.
    pub fn new(num_samples: u64) -> Self {
        let workshop = Self { dir: tempfile::tempdir().unwrap() };
        fs::write(workshop.path("train.jsonl"), samples(num_samples, 1)).unwrap();
        fs::write(workshop.path("validation.jsonl"), samples(2, 2)).unwrap();
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2");
        fs::write(workshop.path("recipe.toml"), RECIPE.replace("MODEL", model.to_str().unwrap())).unwrap();
        workshop
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// `kvtune ARGUMENTS` on one thread of the CPU; `failpoint` as `KVTUNE_FAILPOINT` has it, empty for none.
    pub fn command(&self, failpoint: &str, arguments: &[&str]) -> Command {
        let mut command = kvtune();
        command.args(arguments).args(["--device", "cpu"]).current_dir(self.dir.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if !failpoint.is_empty() {
            command.env("KVTUNE_FAILPOINT", failpoint);
        }
        command
    }

    pub fn kvtune(&self, failpoint: &str, arguments: &[&str]) -> Ended {
        of_output(&starter::output(&self.command(failpoint, arguments)))
    }

    /// Begins a run in the directory `run`.
    pub fn finetune(&self, failpoint: &str, run: &str, set: &[&str]) -> Ended {
        self.kvtune(failpoint, &finetune_arguments(run, set))
    }

    /// Begins a run that trains all weights.
    pub fn finetune_full(&self, run: &str, set: &[&str]) -> Ended {
        self.kvtune("", &finetune_full_arguments(run, set))
    }

    /// Takes `[lora]` out of the recipe.
    pub fn without_adapter(self) -> Self {
        let path = self.path("recipe.toml");
        let text = fs::read_to_string(&path).unwrap();
        let (before, rest) = text.split_once("[lora]\n").unwrap();
        fs::write(path, format!("{before}[data]{}", rest.split_once("[data]").unwrap().1)).unwrap();
        self
    }

    /// A run to its end; returns what it left.
    pub fn finished(&self, run: &str, set: &[&str]) -> Left {
        self.finetune("", run, set).with(0);
        self.left(run)
    }

    pub fn resume(&self, failpoint: &str, run: &str, more: &[&str]) -> Ended {
        self.kvtune(failpoint, &[&["resume", run], more].concat())
    }

    /// A copy of a run's directory.
    pub fn copy(&self, from: &str, to: &str) {
        copy_dir(&self.path(from), &self.path(to));
    }

    pub fn left(&self, run: &str) -> Left {
        let run = self.path(run);
        let mut files = BTreeMap::new();
        for dir in names(&run).into_iter().filter(|n| is_checkpoint(n)) {
            // A card has its run's name and recipe.
            for name in names(&run.join(&dir)).into_iter().filter(|name| name != "README.md") {
                files.insert(format!("{dir}/{name}"), fs::read(run.join(&dir).join(&name)).unwrap());
            }
        }
        let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
        Left { files, metrics: metrics.lines().map(without_times).collect() }
    }

    /// Asserts that a run left the same as another one, apart from what is named otherwise.
    #[track_caller]
    pub fn assert_left(&self, run: &str, expected: &Left) {
        let found = self.left(run);
        let names = |left: &Left| left.files.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&found), names(expected), "{run}");
        assert_eq!(found.metrics, expected.metrics, "{run}");
        for (name, bytes) in &expected.files {
            assert!(found.files[name] == *bytes, "{run}: `{name}` differs");
        }
        assert_eq!(self.latest(run), "final", "{run}");
        assert_eq!(leftovers(&self.path(run)), [""; 0], "{run}");
    }

    /// How far what two runs have trained lies apart at their ends: largest over the matrices, relative to the norm of the first.
    pub fn difference(&self, expected: &str, found: &str) -> f64 {
        let (expected, found) = (trained(&self.path(expected)), trained(&self.path(found)));
        assert_eq!(expected.keys().collect::<Vec<_>>(), found.keys().collect::<Vec<_>>());
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v.powi(2)).sum::<f64>().sqrt();
        let relative = |(name, a): (&String, &Vec<f64>)| {
            let difference = norm(&mut a.iter().zip(&found[name]).map(|(a, b)| a - b));
            difference / norm(&mut a.iter().copied())
        };
        expected.iter().map(relative).fold(0.0, f64::max)
    }

    pub fn latest(&self, run: &str) -> String {
        fs::read_to_string(self.path(run).join("latest")).unwrap().trim().to_owned()
    }

    pub fn checkpoints(&self, run: &str) -> Vec<String> {
        names(&self.path(run)).into_iter().filter(|n| is_checkpoint(n)).collect()
    }

    /// Waits until a run has written `lines` lines of metrics.
    pub fn wait_for_lines(&self, run: &str, lines: usize) {
        let path = self.path(run).join("metrics.jsonl");
        wait_until(|| fs::read_to_string(&path).is_ok_and(|text| text.lines().count() >= lines));
    }
}

/// The arguments that begin a run.
pub fn finetune_arguments<'a>(run: &'a str, set: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = vec!["finetune-lora", "--recipe", "recipe.toml", "--out", run];
    for set in set {
        arguments.extend(["--set", set]);
    }
    arguments
}

/// The same for all weights.
pub fn finetune_full_arguments<'a>(run: &'a str, set: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = finetune_arguments(run, set);
    arguments[0] = "finetune-full";
    arguments
}

/// Waits for the end of a process.
pub fn ended(child: Child) -> Ended {
    of_output(&child.wait_with_output().unwrap())
}

fn of_output(output: &Output) -> Ended {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let code = output.status.code().ok_or_else(|| output.status.signal().unwrap());
    Ended { code, stdout: text(&output.stdout), stderr: text(&output.stderr) }
}

/// Waits for what must come, however slow the machine is.
#[track_caller]
pub fn wait_until(mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(120), "waited in vain");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until a process has stopped itself at a failpoint.
pub fn wait_for_stop(child: &Child) {
    // The state is the first letter behind the name, which stands in parentheses.
    let path = format!("/proc/{}/stat", child.id());
    wait_until(|| {
        let text = fs::read_to_string(&path).unwrap();
        text.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
    });
}

/// Sends a signal to a process.
pub fn send(child: &Child, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

/// The names in a directory, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Asserts that a checkpoint's files are those that its manifest lists.
#[track_caller]
pub fn assert_valid(checkpoint: &Path) {
    let manifest: Value = serde_json::from_slice(&fs::read(checkpoint.join("MANIFEST.json")).unwrap()).unwrap();
    let files = manifest["files"].as_object().unwrap();
    let listed = names(checkpoint).into_iter().filter(|name| !["MANIFEST.json", "README.md"].contains(&&name[..]));
    assert_eq!(files.keys().cloned().collect::<BTreeSet<_>>(), listed.collect(), "{}", checkpoint.display());
    for (name, entry) in files {
        let hash = blake3::hash(&fs::read(checkpoint.join(name)).unwrap());
        assert_eq!(entry["blake3"], hash.to_hex().as_str(), "{}: {name}", checkpoint.display());
    }
}

/// What saves have left in a directory that were cut short.
pub fn leftovers(dir: &Path) -> Vec<String> {
    names(dir).into_iter().filter(|name| name.contains(".tmp-")).collect()
}

pub fn is_checkpoint(name: &str) -> bool {
    name.starts_with("step-") && !name.contains('.') || name == "best" || name == "final"
}

/// All files below a directory but the lock, with their content.
pub fn tree(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for name in names(dir).into_iter().filter(|name| name != ".lock") {
        let path = dir.join(name);
        if path.is_dir() {
            files.extend(tree(&path));
        } else {
            let bytes = fs::read(&path).unwrap();
            files.insert(path, bytes);
        }
    }
    files
}

pub fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for name in names(from) {
        if from.join(&name).is_dir() {
            copy_dir(&from.join(&name), &to.join(&name));
        } else {
            fs::copy(from.join(&name), to.join(&name)).unwrap();
        }
    }
}

/// The final adapter of a run, or all weights.
fn trained(run: &Path) -> BTreeMap<String, Vec<f64>> {
    let adapter = fs::read(run.join("final/adapter_model.safetensors"));
    let bytes = adapter.or_else(|_| fs::read(run.join("final/model.safetensors"))).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let values = |tensor: &TensorView<'_>| match tensor.dtype() {
        Dtype::F32 => tensor.data().as_chunks::<4>().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect(),
        Dtype::F64 => tensor.data().as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect(),
        other => panic!("{other:?}"),
    };
    file.tensors().into_iter().map(|(name, tensor)| (name, values(&tensor))).collect()
}

/// A line of metrics as it repeats.
fn without_times(line: &str) -> Value {
    let mut line: Value = serde_json::from_str(line).unwrap();
    for key in ["seconds", "tokens_per_second", "peak_memory", "check"] {
        assert!(line.as_object_mut().unwrap().remove(key).is_some(), "{line}");
    }
    line
}

/// Token samples of 9 to 48 tokens, some of them without a target.
fn samples(count: u64, seed: u64) -> String {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut next = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let mut line = || {
        let ids: Vec<u64> = (0..9 + next(40)).map(|_| 1 + next(200)).collect();
        let labels: Vec<i64> = ids.iter().map(|&id| if next(4) == 0 { -100 } else { id as i64 }).collect();
        serde_json::json!({ "input_ids": ids, "labels": labels }).to_string() + "\n"
    };
    (0..count).map(|_| line()).collect()
}
