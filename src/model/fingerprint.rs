//! Tells one model directory from another, so that a run goes on with the weights that it began with.

use std::fs;
use std::path::Path;

use super::ModelError;
use crate::files::{self, FilesError};

/// Weights are many gigabytes; their header and the first values of the file are within this, and so are the last ones.
const WINDOW: u64 = 1 << 20;

/// A hash of what a model directory says: its configuration, its tokenizer, and both ends of each file of weights.
pub fn fingerprint(dir: &Path) -> Result<String, ModelError> {
    let entries = fs::read_dir(dir).map_err(FilesError::io("read", dir))?;
    let counts = |name: &String| {
        let is_weights = name.starts_with("model") && Path::new(name).extension().is_some_and(|e| e == "safetensors");
        is_weights || ["config.json", "tokenizer.json"].contains(&name.as_str())
    };
    let mut names: Vec<String> = entries.flatten().filter_map(|e| e.file_name().into_string().ok()).filter(counts).collect();
    names.sort_unstable();
    let line = |name: &String| Ok(format!("{name} {}\n", files::hash_ends(&dir.join(name), WINDOW)?));
    let lines = names.iter().map(line).collect::<Result<Vec<_>, FilesError>>()?;
    Ok(files::hash_bytes(lines.concat().as_bytes()))
}
