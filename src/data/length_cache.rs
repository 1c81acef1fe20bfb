//! Token counts of a data file, kept beside it, so that the second start doesn't tokenise the file again.
//!
//! A text file of 500 long documents takes minutes to tokenise; what the start needs of it is two numbers per sample.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::on_too_long::Length;
use crate::files;

/// Raised whenever prompts or counts change their meaning.
const VERSION: u32 = 1;

/// Data, tokenizers and heads that one cache file remembers; the oldest is forgotten first.
const MAX_ENTRIES: usize = 4;

/// What the counts depend on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Key {
    pub(super) data_hash: String,
    pub(super) tokenizer_hash: String,
    /// Format and head: they decide the wording of prompts.
    pub(super) kind: String,
}

#[derive(Serialize, Deserialize)]
struct LengthCacheFile {
    version: u32,
    entries: Vec<CachedLengths>,
}

#[derive(Serialize, Deserialize)]
struct CachedLengths {
    key: Key,
    /// Per sample: all tokens, and the leading ones that are prompt.
    lengths: Vec<(usize, usize)>,
}

/// The places a cache may lie in, the best first: beside the data file, then in the user's cache folder.
pub(super) fn places(data: &Path, data_hash: &str) -> Vec<PathBuf> {
    let mut beside = data.as_os_str().to_owned();
    beside.push(".lengths.json");
    let folder = |variable: &str| std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")));
    let name = format!("{}.lengths.json", &data_hash[..data_hash.len().min(16)]);
    std::iter::once(PathBuf::from(beside)).chain(cache.map(|cache| cache.join("kvtune").join(name))).collect()
}

/// The recorded lengths, if a valid record for this key lies in one of the places.
pub(super) fn read(places: &[PathBuf], key: &Key, num_samples: usize) -> Option<Vec<Length>> {
    let valid = |entry: &CachedLengths| {
        entry.key == *key
            && entry.lengths.len() == num_samples
            && entry.lengths.iter().all(|&(total, prompt)| total > 0 && prompt <= total)
    };
    let entry = places.iter().find_map(|place| stored(place)?.entries.into_iter().find(valid))?;
    Some(entry.lengths.into_iter().map(|(total, prompt)| Length { total, prompt }).collect())
}

/// Records lengths in the first place that can be written to; the error of the last one if none can.
pub(super) fn write(places: &[PathBuf], key: &Key, lengths: &[Length]) -> Result<(), String> {
    let mut problem = "there is no folder for it".to_owned();
    for place in places {
        match write_to(place, key, lengths) {
            Ok(()) => return Ok(()),
            Err(error) => problem = error,
        }
    }
    Err(problem)
}

fn write_to(place: &Path, key: &Key, lengths: &[Length]) -> Result<(), String> {
    let mut entries = stored(place).map_or_else(Vec::new, |stored| stored.entries);
    entries.retain(|entry| entry.key != *key);
    entries.insert(0, CachedLengths { key: key.clone(), lengths: lengths.iter().map(|l| (l.total, l.prompt)).collect() });
    entries.truncate(MAX_ENTRIES);
    let json = serde_json::to_vec(&LengthCacheFile { version: VERSION, entries }).map_err(|error| error.to_string())?;
    if let Some(folder) = place.parent().filter(|folder| folder.ends_with("kvtune")) {
        std::fs::create_dir_all(folder).map_err(|error| error.to_string())?;
    }
    files::write_atomic(place, &json).map_err(|error| error.to_string())
}

/// What is stored in a place; a file that is missing, damaged or of another version is as good as none.
fn stored(place: &Path) -> Option<LengthCacheFile> {
    let bytes = std::fs::read(place).ok()?;
    serde_json::from_slice::<LengthCacheFile>(&bytes).ok().filter(|stored| stored.version == VERSION)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(tokenizer: &str) -> Key {
        Key { data_hash: "d".into(), tokenizer_hash: tokenizer.into(), kind: "tokens/next_token".into() }
    }

    const LENGTHS: [Length; 2] = [Length { total: 9, prompt: 4 }, Length { total: 3, prompt: 0 }];

    #[test]
    fn remembers_by_key_and_believes_only_what_is_valid() {
        let dir = tempfile::tempdir().unwrap();
        let places = [dir.path().join("a.lengths.json")];
        assert_eq!(read(&places, &key("t"), 2), None);
        write(&places, &key("t"), &LENGTHS).unwrap();
        write(&places, &key("u"), &LENGTHS[..1]).unwrap();
        assert_eq!(read(&places, &key("t"), 2).unwrap(), LENGTHS);
        assert_eq!(read(&places, &key("u"), 1).unwrap(), LENGTHS[..1]);
        assert_eq!(read(&places, &key("t"), 3), None);
        assert_eq!(read(&places, &key("v"), 2), None);
        write(&places, &key("t"), &[Length { total: 0, prompt: 0 }, Length { total: 1, prompt: 2 }]).unwrap();
        assert_eq!(read(&places, &key("t"), 2), None);
        std::fs::write(&places[0], b"{\"version\":1,").unwrap();
        assert_eq!(read(&places, &key("u"), 1), None);
        for n in 0..9 {
            write(&places, &key(&n.to_string()), &LENGTHS).unwrap();
        }
        assert!(read(&places, &key("8"), 2).is_some() && read(&places, &key("0"), 2).is_none());
    }

    #[test]
    fn falls_back_to_the_next_place() {
        let dir = tempfile::tempdir().unwrap();
        let places = [dir.path().join("no/such/folder/a.json"), dir.path().join("kvtune/b.json")];
        write(&places, &key("t"), &LENGTHS).unwrap();
        assert_eq!(read(&places, &key("t"), 2).unwrap(), LENGTHS);
        assert!(write(&places[..1], &key("t"), &LENGTHS).is_err());
        let beside = super::places(Path::new("/data/train.jsonl"), "0123456789abcdef0123");
        assert_eq!(beside[0], Path::new("/data/train.jsonl.lengths.json"));
        assert!(beside[1..].iter().all(|place| place.ends_with("kvtune/0123456789abcdef.lengths.json")));
    }
}
