//! Tells one model directory from another, so that a run goes on with the model that it began with.

use std::fs;
use std::path::{Path, PathBuf};

use super::weights::{INDEX, weight_files};
use crate::files::{self, GgufFile, io_fault};
use crate::units::Fault;

/// What a fingerprint of whole files begins with.
const WHOLE: &str = "blake3:";

/// What is read of a model directory beside its weights.
const BESIDE: [&str; 5] = ["config.json", "generation_config.json", "quantize_config.json", "tokenizer.json", INDEX];

/// A hash of what is read of a model directory: configuration, tokenizer, index, and every byte of each file of weights. Large files that
/// have not changed since they were last hashed are not read again ([`files::hash_large_file`]).
pub fn fingerprint(dir: &Path) -> Result<String, Fault> {
    let beside = BESIDE.iter().filter(|name| files::lies_in(dir, name)).map(|name| dir.join(name));
    let weights = match GgufFile::of_model(dir)? {
        Some(file) => file.paths().map(Path::to_owned).collect(),
        None => weight_files(dir)?,
    };
    Ok(format!("{WHOLE}{}", hash_of(beside.chain(weights), files::hash_large_file)?))
}

/// A hash of files, by their names and hashes.
fn hash_of(paths: impl Iterator<Item = PathBuf>, hash: impl Fn(&Path) -> Result<String, Fault>) -> Result<String, Fault> {
    let line = |path: PathBuf| Ok(format!("{} {}\n", path.file_name().unwrap_or_default().display(), hash(&path)?));
    let lines = paths.map(line).collect::<Result<String, Fault>>()?;
    Ok(files::hash_bytes(lines.as_bytes()))
}

/// Whether a model directory is the one that `saved` is the fingerprint of, as this version or an earlier one has made it.
pub fn has_fingerprint(dir: &Path, saved: &str) -> Result<bool, Fault> {
    if saved.starts_with(WHOLE) { Ok(fingerprint(dir)? == saved) } else { Ok(of_ends(dir)? == saved) }
}

/// An earlier version's: configuration, tokenizer, and this much of both ends of each file of weights.
fn of_ends(dir: &Path) -> Result<String, Fault> {
    const WINDOW: u64 = 1 << 20;
    let entries = fs::read_dir(dir).map_err(io_fault("read", dir))?;
    let counts = |name: &String| {
        let is_weights = name.starts_with("model") && Path::new(name).extension().is_some_and(|e| e == "safetensors");
        is_weights || ["config.json", "tokenizer.json"].contains(&name.as_str())
    };
    let mut names: Vec<String> = entries.flatten().filter_map(|e| e.file_name().into_string().ok()).filter(counts).collect();
    names.sort_unstable();
    hash_of(names.iter().map(|name| dir.join(name)), |path| files::hash_ends(path, WINDOW))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_byte_of_what_is_read_counts() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/model-qwen2");
        for name in ["config.json", "tokenizer.json"] {
            fs::copy(model.join(name), path(name)).unwrap();
        }
        let weights = fs::read(model.join("model.safetensors")).unwrap();
        let of = || fingerprint(dir.path()).unwrap();
        // Under another name, which an index gives.
        fs::write(path("part.safetensors"), &weights).unwrap();
        fs::write(path(INDEX), r#"{"weight_map": {"model.norm.weight": "part.safetensors"}}"#).unwrap();
        let first = of();
        assert_eq!((of() == first, has_fingerprint(dir.path(), &first).unwrap()), (true, true));
        let mut seen = vec![first];
        let mut other = weights.clone();
        other[weights.len() / 2] ^= 1;
        fs::write(path("part.safetensors"), &other).unwrap();
        seen.push(of());
        fs::write(path("generation_config.json"), "{}").unwrap();
        seen.push(of());
        fs::write(path("tokenizer.json"), "{}").unwrap();
        seen.push(of());
        for (at, hash) in seen.iter().enumerate() {
            assert!(!seen[..at].contains(hash), "change {at} is not seen");
        }
        assert!(has_fingerprint(dir.path(), &of_ends(dir.path()).unwrap()).unwrap(), "an earlier version's");
    }
}
