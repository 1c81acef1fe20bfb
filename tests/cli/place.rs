//! Where a test works: a directory with a model, data and a recipe that runs as they stand, and the binary.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;

use serde_json::{Map, Value};
use tempfile::TempDir;

use crate::binary::kvtune;
use crate::starter;

/// Rows of the training file.
pub(crate) const NUM_ROWS: usize = 6;
/// Tokens of each row; one less is run.
pub(crate) const ROW_LEN: usize = 41;

const RECIPE: &str = r#"[model]
path = "model"
[lora]
r = 4
alpha = 8
[data]
format = "tokens"
train = "train.jsonl"
validation_fraction = 0
[kv_cache]
policy = "h2o"
cache_length = 32
chunk_size = 8
[train]
micro_batch_size = 2
max_steps = 3
[checkpoint]
save_interval = 1
"#;

/// A directory of its own for each test.
pub(crate) struct Place {
    dir: TempDir,
}

/// What the binary said.
pub(crate) struct Said {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Place {
    /// With everything in order.
    pub(crate) fn new() -> Self {
        let place = Self { dir: tempfile::tempdir().unwrap() };
        let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        for (from, to) in [("model-qwen2", "model"), ("adapter-qwen2", "adapter")] {
            fs::create_dir(place.path(to)).unwrap();
            for file in fs::read_dir(fixtures.join(from)).unwrap() {
                let file = file.unwrap();
                fs::copy(file.path(), place.path(to).join(file.file_name())).unwrap();
            }
        }
        let rows: Vec<String> = (0..NUM_ROWS).map(row).collect();
        place.write("train.jsonl", rows.concat());
        place.write("recipe.toml", RECIPE);
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    /// The names in a directory, sorted.
    pub(crate) fn names(&self, dir: &str) -> Vec<String> {
        let names = fs::read_dir(self.path(dir)).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    /// Changes keys of a JSON file; `null` removes.
    #[allow(clippy::needless_pass_by_value, reason = "changes are written where they are used, by `json!`")]
    pub(crate) fn edit_json(&self, name: &str, changes: Value) {
        let mut object: Map<String, Value> = serde_json::from_slice(&self.read(name)).unwrap();
        for (key, value) in changes.as_object().unwrap() {
            if value.is_null() {
                object.remove(key);
            } else {
                object.insert(key.clone(), value.clone());
            }
        }
        self.write(name, serde_json::to_vec(&object).unwrap());
    }

    /// Replaces a line of the recipe, which must be there.
    pub(crate) fn edit_recipe(&self, line: &str, new: &str) {
        let text = String::from_utf8(self.read("recipe.toml")).unwrap();
        assert!(text.contains(line), "{line}");
        self.write("recipe.toml", text.replace(line, new));
    }

    /// The binary, to be run in this directory. A backtrace is asked for, so that one that is printed is seen.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = kvtune();
        command.current_dir(self.dir.path()).args(arguments);
        command.env("RUST_BACKTRACE", "1").env("XDG_CACHE_HOME", self.path("cache"));
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Said {
        self.hear(&self.command(arguments))
    }

    /// Runs `command` in a fork.
    pub(crate) fn hear(&self, command: &Command) -> Said {
        self.said(starter::output(command))
    }

    /// Starts `command` and gives it some input.
    pub(crate) fn hear_beside(&self, mut command: Command, input: &str) -> Said {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let (id, (done, output)) = (child.id(), mpsc::channel());
        thread::spawn(move || done.send(child.wait_with_output()));
        let Ok(output) = output.recv_timeout(starter::PATIENCE) else {
            starter::kill(id as i32);
            panic!("{command:?} does not end");
        };
        self.said(output.unwrap())
    }

    /// Replaces what differs from one machine to the next.
    fn said(&self, output: Output) -> Said {
        let dir = self.dir.path().canonicalize().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap().replace(&*dir.to_string_lossy(), "<dir>");
        Said { code: output.status.code().unwrap_or(-1), out: text(output.stdout), err: text(output.stderr) }
    }

    /// `kvtune check --recipe recipe.toml --set …`.
    pub(crate) fn check(&self, overrides: &[&str]) -> Said {
        self.on_cpu("check", overrides)
    }

    /// `kvtune finetune-lora --recipe recipe.toml --out run --set …`.
    pub(crate) fn finetune(&self, overrides: &[&str]) -> Said {
        let overrides: Vec<&str> = overrides.iter().flat_map(|o| ["--set", o]).collect();
        self.run(&[&["finetune-lora", "--device", "cpu", "--recipe", "recipe.toml", "--out", "run"][..], &overrides].concat())
    }

    /// A verb with the recipe and overrides.
    pub(crate) fn on_cpu(&self, verb: &str, overrides: &[&str]) -> Said {
        let overrides: Vec<&str> = overrides.iter().flat_map(|o| ["--set", o]).collect();
        self.run(&[&[verb, "--device", "cpu", "--recipe", "recipe.toml"][..], &overrides].concat())
    }
}

impl Said {
    /// The error, after checking that it is one as it should be: the exit code, what and where, a way out, and nothing raw.
    pub(crate) fn refused(self, code: i32) -> String {
        let everything = format!("{}{}", self.out, self.err);
        assert_eq!(self.code, code, "{everything}");
        for raw in ["panicked", "backtrace", "RUST_BACKTRACE", ".rs:", "unwrap", "Some("] {
            assert!(!everything.contains(raw), "{raw} in:\n{everything}");
        }
        let start = self.err.find("error: ").unwrap_or_else(|| panic!("no error:\n{everything}"));
        let error = self.err[start..].trim_end().to_owned();
        assert!(error.contains("\n\nhint: "), "no hint:\n{error}");
        error
    }

    /// The same for what the parser of the arguments refuses, whose way out is `--help`.
    pub(crate) fn misused(self) -> String {
        assert_eq!(self.code, 2, "{}{}", self.out, self.err);
        assert!(self.err.starts_with("error: ") && self.err.contains("--help"), "{}", self.err);
        self.err.trim_end().to_owned()
    }

    pub(crate) fn done(self) -> Self {
        assert_eq!(self.code, 0, "{}{}", self.out, self.err);
        self
    }
}

/// A line of the training file.
pub(crate) fn row(index: usize) -> String {
    let ids: Vec<usize> = (0..ROW_LEN).map(|i| 1 + (i * 7 + index * 31) % 500).collect();
    format!("{{\"input_ids\": {ids:?}, \"labels\": {ids:?}}}\n")
}

/// A line for the classification head.
pub(crate) fn classified(index: usize) -> String {
    let ids: Vec<usize> = (0..ROW_LEN).map(|i| 1 + (i * 7 + index * 31) % 500).collect();
    format!("{{\"input_ids\": {ids:?}, \"label\": {}}}\n", index % 4)
}
