//! The folder of a case: what the tests of the command line stand on, and how a maker spoils it.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::ops::Deref;
use std::path::Path;
use std::sync::OnceLock;

use serde_json::Value;

use crate::cli::place::Place;

/// A sound model, adapter, data and recipe.
pub(super) struct Ground(Place);

impl Deref for Ground {
    type Target = Place;
    fn deref(&self) -> &Place {
        &self.0
    }
}

impl Ground {
    pub(super) fn new() -> Self {
        Self(Place::new())
    }

    pub(super) fn remove(&self, name: &str) {
        let path = self.path(name);
        let is_dir = path.symlink_metadata().unwrap().is_dir();
        if is_dir { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
    }

    pub(super) fn text(&self, name: &str) -> String {
        String::from_utf8(self.read(name)).unwrap()
    }

    /// A key of a JSON file gets a value, which is written as it stands.
    pub(super) fn set_json(&self, name: &str, key: &str, value: &str) {
        let mut json: Value = serde_json::from_slice(&self.read(name)).unwrap();
        json.as_object_mut().unwrap().remove(key);
        let rest = json.to_string();
        self.write(name, format!("{{{key:?}: {value}, {}", &rest[1..]));
    }

    /// A file of `before`, then `bytes` so many times, then `after`.
    pub(super) fn repeat(&self, name: &str, (before, after): (&str, &str), bytes: &[u8], times: usize) {
        let mut file = BufWriter::with_capacity(1 << 20, File::create(self.path(name)).unwrap());
        file.write_all(before.as_bytes()).unwrap();
        // In pieces, because a debug build writes small parts slowly.
        let at_once = ((1 << 20) / bytes.len()).max(1);
        let many = bytes.repeat(at_once);
        for done in (0..times).step_by(at_once) {
            file.write_all(&many[..bytes.len() * at_once.min(times - done)]).unwrap();
        }
        file.write_all(after.as_bytes()).unwrap();
        file.flush().unwrap();
    }

    /// A file without content that says it has so many bytes.
    pub(super) fn sparse(&self, name: &str, bytes: u64) {
        File::create(self.path(name)).unwrap().set_len(bytes).unwrap();
    }

    /// Rows of another format in place of those of tokens, so that they go through the tokenizer.
    pub(super) fn with_rows(&self, format: &str, rows: impl AsRef<[u8]>) {
        self.write("train.jsonl", rows);
        self.edit_recipe("format = \"tokens\"", &format!("format = {format:?}"));
    }

    pub(super) fn with_texts(&self) {
        self.with_rows("text", "{\"text\": \"the words of a text, and some more\"}\n");
    }

    pub(super) fn with_messages(&self) {
        let messages = "[{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}]";
        self.with_rows("messages", format!("{{\"messages\": {messages}}}\n"));
    }

    /// The recipe starts from the adapter.
    pub(super) fn with_adapter(&self) {
        self.edit_recipe("path = \"model\"", "path = \"model\"\nadapter = \"adapter\"");
    }

    /// A finished run of three steps in `run`; its recipe names the model and the data of the place in which it was made.
    pub(super) fn with_run(&self) {
        copy(&finished().path("run"), &self.path("run"));
    }

    /// The same before its last step.
    pub(super) fn with_unfinished_run(&self) {
        self.with_run();
        for later in ["final", "step-000003"] {
            self.remove(&format!("run/{later}"));
        }
    }

    /// Tokenises the data, and names the file in which the tokens are kept.
    pub(super) fn kept_tokens(&self) -> String {
        self.check(&[]).done();
        let dir = "train.jsonl.tokens";
        format!("{dir}/{}", self.names(dir)[0])
    }
}

/// The place of the run that cases copy. It stays, because the run names what it was made of.
fn finished() -> &'static Place {
    static PLACE: OnceLock<Place> = OnceLock::new();
    PLACE.get_or_init(|| {
        let place = Place::new();
        place.finetune(&[]).done();
        place
    })
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() { copy(&path, &target) } else { fs::copy(&path, &target).map(drop).unwrap() }
    }
}
