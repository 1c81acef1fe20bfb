//! What the Hub knows of a base model and of data sets: their ids, and the licence that the model's own card names.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use crate::checkpoint::CARD;
use crate::files::{self, FileKind, cached_id};

/// What a card says of the base model. Nothing of it is needed: what can't be read is left out.
#[derive(Debug)]
pub(super) struct BaseModel {
    /// On the Hub; `None` where nothing tells it.
    pub(super) id: Option<String>,
    /// What it is called: its id, or its directory's name.
    pub(super) name: String,
    /// The keys of its card that begin with `license`.
    pub(super) license: BTreeMap<String, Value>,
}

impl BaseModel {
    pub(super) fn read(dir: &Path) -> Self {
        let config: Option<Map<String, Value>> = files::read_json(&dir.join("config.json")).ok();
        let named = config.as_ref().and_then(|config| config.get("_name_or_path")?.as_str());
        // Another directory may stand there in place of an id.
        let named = named.filter(|name| name.contains('/') && files::is_hub_name(name) && !Path::new(name).exists());
        let id = cached_id(dir, "models").or_else(|| named.map(str::to_owned));
        let absolute = files::absolute(dir);
        let own_name = || absolute.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Self { name: id.clone().unwrap_or_else(own_name), id, license: license(dir).unwrap_or_default() }
    }
}

/// From the YAML at the head of a model's card.
fn license(dir: &Path) -> Option<BTreeMap<String, Value>> {
    let text = files::read_text(&dir.join(CARD), FileKind::Template).ok()?;
    let (head, _) = text.strip_prefix("---")?.split_once("\n---")?;
    let all: BTreeMap<String, Value> = serde_saphyr::from_str(head).ok()?;
    Some(all.into_iter().filter(|(key, value)| key.starts_with("license") && value.is_string()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_those_of_the_hub_and_no_paths() {
        for (id, expected) in [
            ("Qwen/Qwen2.5-0.5B", true),
            ("gpt2", true),
            ("/home/me/model", false),
            ("./model", false),
            ("../model", false),
            ("a/b/c", false),
            ("a--b/c", false),
            ("a/", false),
        ] {
            assert_eq!(files::is_hub_name(id), expected, "{id}");
        }
        let dir = Path::new("/cache/hub/models--Qwen--Qwen2.5-0.5B/snapshots/0123abc");
        assert_eq!(cached_id(dir, "models").as_deref(), Some("Qwen/Qwen2.5-0.5B"));
        assert_eq!(cached_id(dir, "datasets"), None);
        let file = Path::new("/cache/hub/datasets--ai--long-texts/snapshots/0123abc/data/train.parquet");
        assert_eq!(cached_id(file, "datasets").as_deref(), Some("ai/long-texts"));
        assert_eq!(cached_id(Path::new("/models/Qwen2.5-0.5B"), "models"), None);
    }

    #[test]
    fn a_base_is_named_and_its_licence_told_as_its_own_files_have_them() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let name = dir.path().file_name().unwrap().to_str().unwrap().to_owned();
        let found = BaseModel::read(dir.path());
        assert_eq!((found.id, found.name, found.license.len()), (None, name.clone(), 0));
        write("config.json", r#"{"_name_or_path": "org/base"}"#);
        write(CARD, "---\nlanguage: en\nlicense: other\nlicense_name: my-own\ntags: [a]\n---\n# Base\nlicense: none\n");
        let found = BaseModel::read(dir.path());
        assert_eq!((found.id.as_deref(), found.name.as_str()), (Some("org/base"), "org/base"));
        let license: Vec<_> = found.license.iter().map(|(key, value)| (key.as_str(), value.as_str().unwrap())).collect();
        assert_eq!(license, [("license", "other"), ("license_name", "my-own")]);
        write("config.json", r#"{"_name_or_path": "/home/me/model"}"#);
        write(CARD, "---\nlicense: [\n---\n");
        let found = BaseModel::read(dir.path());
        assert_eq!((found.id, found.name, found.license.len()), (None, name, 0));
    }
}
