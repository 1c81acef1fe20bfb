//! The small files of a model's directory, which a GGUF file has keys in place of.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::atomic::{parent, refuse_foreign_link};
use super::gguf::{GgufFile, config_of, tokenizer_config, tokenizer_json};
use super::{FileKind, io_fault, is_there, parse_json, read_if_there, to_json};
use crate::units::Fault;

const CONFIG: &str = "config.json";

/// Whether a path is a model's: a directory in Hugging Face's format, a GGUF file, or a folder with one.
pub fn is_model(path: &Path) -> bool {
    path.join(CONFIG).exists() || !matches!(GgufFile::of_model(path), Ok(None))
}

/// A file of a model's directory, or what the keys of a GGUF file say in its place: configuration, tokenizer with its settings, and what ends
/// a text. What lies in a folder beside a GGUF file counts, and a `tokenizer.json` beside one whose own tokenizer is not known.
pub fn read_of_model(dir: &Path, name: &str, kind: FileKind) -> Result<Option<Vec<u8>>, Fault> {
    let path = dir.join(name);
    let gguf = if lies_in(dir, name) { None } else { GgufFile::of_model(dir)? };
    let Some(file) = gguf else { return read_if_there(&path, kind) };
    // A model that is made of nothing but tokens has none.
    if name.starts_with("tokenizer") && matches!(file.text("tokenizer.ggml.model")?, None | Some("none" | "no_vocab")) {
        return read_if_there(&file.path().with_file_name(name), kind);
    }
    let value: Value = match name {
        CONFIG => config_of(&file)?,
        "generation_config.json" => json!({ "eos_token_id": file.end_ids()? }),
        "tokenizer_config.json" => tokenizer_config(&file)?,
        "tokenizer.json" => match tokenizer_json(&file) {
            Ok(json) => json,
            Err(error) => return read_if_there(&file.path().with_file_name(name), kind)?.map(Some).ok_or(error),
        },
        _ => return Ok(None),
    };
    Ok(Some(to_json(&value)))
}

/// A file of [`read_of_model`] that is to be copied beside what is made of the model. It, and its folder, must not lead out of the model: that
/// is an error of kind [`FaultKind::ForeignLink`](crate::units::FaultKind::ForeignLink).
pub fn read_companion(dir: &Path, name: &str) -> Result<Option<Vec<u8>>, Fault> {
    // Beside a GGUF file that is named itself its folder is the model's.
    let home = if dir.is_dir() { dir } else { parent(dir) };
    for part in Path::new(name).ancestors().filter(|part| !part.as_os_str().is_empty()) {
        refuse_foreign_link(home, &home.join(part))?;
    }
    let kind = match name {
        _ if name.ends_with("_config.json") || name == "special_tokens_map.json" => FileKind::Settings,
        _ if name.ends_with("jinja") => FileKind::Template,
        _ => FileKind::Tokenizer,
    };
    read_of_model(dir, name, kind)
}

/// Whether a model has such a file, or something in its place.
pub fn has_of_model(dir: &Path, name: &str) -> bool {
    lies_in(dir, name) || matches!(read_of_model(dir, name, FileKind::Tokenizer), Ok(Some(_)) | Err(_))
}

pub fn lies_in(dir: &Path, name: &str) -> bool {
    dir.is_dir() && is_there(&dir.join(name))
}

pub const TEMPLATE_FOLDER: &str = "additional_chat_templates";

/// The further chat templates of a model, by their names in its directory, sorted.
pub fn further_templates(dir: &Path) -> Result<Vec<String>, Fault> {
    let folder = dir.join(TEMPLATE_FOLDER);
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let entries =
        std::fs::read_dir(&folder).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(io_fault("read", &folder))?;
    let paths = entries.into_iter().map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|end| end == "jinja"));
    let names = paths.filter(|path| !path.is_dir()).filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    let mut names: Vec<String> = names.map(|name| format!("{TEMPLATE_FOLDER}/{name}")).collect();
    names.sort();
    Ok(names)
}

/// An object in a JSON file of a model's directory; `None` where it is not there.
pub fn object_of_model(dir: &Path, name: &str) -> Result<Option<Map<String, Value>>, Fault> {
    let bytes = read_of_model(dir, name, FileKind::Settings)?;
    bytes.map(|bytes| parse_json(&dir.join(name), &bytes, FileKind::Settings)).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::FaultKind;

    #[test]
    fn a_file_without_a_tokenizer_has_what_lies_beside_it() {
        let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised/model-gguf-llama-q4_0/model.gguf");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        let mut bytes = std::fs::read(base).unwrap();
        let key = b"tokenizer.ggml.model";
        let at = bytes.windows(key.len()).position(|window| window == key).unwrap();
        bytes[at] = b'x';
        std::fs::write(&path, bytes).unwrap();
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            assert!(read_of_model(&path, name, FileKind::Tokenizer).unwrap().is_none() && !has_of_model(&path, name));
            std::fs::write(dir.path().join(name), "{}").unwrap();
            assert_eq!(read_of_model(&path, name, FileKind::Tokenizer).unwrap().unwrap(), b"{}");
        }
        assert!(object_of_model(&path, CONFIG).unwrap().is_some());
        let secret = tempfile::NamedTempFile::new().unwrap();
        std::os::unix::fs::symlink(secret.path(), dir.path().join("tokenizer.model")).unwrap();
        let refused = [path.as_path(), dir.path()].map(|model| read_companion(model, "tokenizer.model").unwrap_err().kind());
        assert_eq!(refused, [FaultKind::ForeignLink; 2]);
    }
}
