//! Folders as `datasets` saves them with `save_to_disk`: one data set, or several splits in a folder each.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::split_name::SplitName;
use crate::data::faults;
use crate::files::{FileKind, parse_json, read_if_there};
use crate::units::Fault;

#[derive(Deserialize)]
struct SavedSplits {
    splits: Vec<String>,
}

#[derive(Deserialize)]
struct SavedState {
    #[serde(rename = "_data_files")]
    data_files: Vec<SavedShard>,
    #[serde(rename = "_indices_data_files")]
    indices: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct SavedShard {
    filename: String,
}

/// The files of such a folder; `None` of another folder.
pub(super) fn files(folder: &Path, wanted: SplitName) -> Result<Option<Vec<PathBuf>>, Fault> {
    if let Some(SavedSplits { splits }) = json(&folder.join("dataset_dict.json"))? {
        let Some(split) = splits.iter().find(|split| SplitName::of(split) == Some(wanted)) else {
            let message = format!("it has no split `{wanted}`, but {}", splits.join(", "));
            return Err(faults::bad_source(folder, &message));
        };
        let of_split = folder.join(split);
        return match shards(&of_split)? {
            Some(files) => Ok(Some(files)),
            None => Err(faults::bad_source(&of_split, "`state.json` of the split is missing")),
        };
    }
    shards(folder)
}

fn shards(folder: &Path) -> Result<Option<Vec<PathBuf>>, Fault> {
    let Some(SavedState { data_files, indices }) = json(&folder.join("state.json"))? else { return Ok(None) };
    if indices.is_some_and(|indices| !indices.is_null()) {
        let message = "its rows are chosen by a file of indices, which is not read: save it anew".to_owned();
        return Err(faults::bad_source(folder, &message));
    }
    let file = |shard: SavedShard| {
        let path = folder.join(&shard.filename);
        let is_missing = !path.is_file();
        if is_missing { Err(faults::bad_source(folder, &format!("the shard `{}` is missing", shard.filename))) } else { Ok(path) }
    };
    data_files.into_iter().map(file).collect::<Result<_, _>>().map(Some)
}

fn json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>, Fault> {
    let bytes = read_if_there(path, FileKind::Settings)?;
    bytes.map(|bytes| parse_json(path, &bytes, FileKind::Settings)).transpose()
}
