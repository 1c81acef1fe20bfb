//! What a recipe names, as files: a file, a pattern, a folder whose files are of several splits or shards, or several of these.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::input::inner_extension;
use crate::data::faults;
use crate::files::{FileKind, parse_json, read_if_there};
use crate::units::{Fault, distinct, listed, named};

const ROWS: [&str; 9] = ["jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow", "feather", "ipc"];

const DOCUMENTS: [&str; 2] = ["txt", "md"];

/// Files of a folder that describe others.
const ABOUT: [&str; 4] = ["dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"];

/// Documents that describe a folder, by their names before the first dot.
const ABOUT_FOLDER: [&str; 7] = ["readme", "license", "licence", "notice", "citation", "changelog", "contributing"];

named! {
    /// A split, as files and folders bear its name.
    pub enum SplitName {
        Train = "train",
        Validation = "validation",
        Test = "test",
    }
}

impl SplitName {
    /// The split by the first word of a name that is one for a split; digits end a word, as in `datasets`.
    fn of(name: &str) -> Option<Self> {
        let mut words = name.split(|letter: char| !letter.is_alphabetic());
        words.find_map(|word| match word.to_ascii_lowercase().as_str() {
            "train" | "training" => Some(Self::Train),
            "validation" | "valid" | "dev" | "val" => Some(Self::Validation),
            "test" | "testing" | "eval" | "evaluation" => Some(Self::Test),
            _ => None,
        })
    }
}

/// The files behind paths, in the order in which they are read; what is left out of folders is added to `notes`, in words. Fails where a path is
/// not there, matches nothing, lacks a shard, or stands for a file that another stands for already.
pub(in crate::data) fn find(paths: &[PathBuf], wanted: SplitName, notes: &mut Vec<String>) -> Result<Vec<PathBuf>, Fault> {
    let mut files = Vec::new();
    for path in paths {
        let is_pattern = !path.exists() && path.to_string_lossy().contains(['*', '?', '[']);
        if is_pattern {
            let (about, others): (Vec<_>, Vec<_>) = matches(path)?.into_iter().partition(|path| describes_folder(path));
            for matched in if others.is_empty() { &about } else { &others } {
                files.extend(files_at(matched, wanted, notes)?);
            }
            if !about.is_empty() && !others.is_empty() {
                let about = names(&about.iter().collect::<Vec<_>>());
                notes.push(format!("of the pattern `{}` {about} is not read: it describes the others", path.display()));
            }
        } else {
            files.extend(files_at(path, wanted, notes)?);
        }
    }
    let mut seen = HashSet::new();
    for file in &files {
        let real = file.canonicalize().map_err(faults::read(file))?;
        if !seen.insert(real) {
            return Err(faults::bad_source(file, "it would be read twice"));
        }
    }
    Ok(files)
}

fn files_at(path: &Path, wanted: SplitName, notes: &mut Vec<String>) -> Result<Vec<PathBuf>, Fault> {
    let is_folder = std::fs::metadata(path).map_err(faults::read(path))?.is_dir();
    if is_folder { folder(path, wanted, notes) } else { Ok(vec![path.to_path_buf()]) }
}

fn matches(pattern: &Path) -> Result<Vec<PathBuf>, Fault> {
    let bad = |message: String| faults::bad_source(pattern, &message);
    let paths = glob::glob(&pattern.to_string_lossy()).map_err(|error| bad(format!("it is no pattern: {error}")))?;
    let mut paths: Vec<PathBuf> = paths.collect::<Result<_, _>>().map_err(|error| bad(error.to_string()))?;
    paths.retain(|path| !name(path).ends_with(".tokens"));
    if paths.is_empty() { Err(bad("no file matches it".to_owned())) } else { Ok(paths) }
}

fn folder(folder: &Path, wanted: SplitName, notes: &mut Vec<String>) -> Result<Vec<PathBuf>, Fault> {
    if let Some(files) = saved_files(folder, wanted)? {
        return Ok(files);
    }
    let entries = entries(folder)?;
    let mut files: Vec<&PathBuf> = entries.iter().filter(|path| is_rows(path)).collect();
    if files.is_empty() {
        files = entries.iter().filter(|path| is_document(path)).collect();
        let folders: Vec<&PathBuf> = entries.iter().filter(|path| path.is_dir()).collect();
        let names: Vec<String> = folders.iter().map(|path| name(path)).collect();
        let inner = only_split(folder, &names, wanted)?.or_else(|| names.iter().position(|name| name == "data"));
        let inner = inner.map(|at| folders[at]);
        // Documents beside a folder of data describe it, as on the Hub.
        if let Some(inner) = inner
            && (files.is_empty() || self::entries(inner)?.iter().any(|path| is_rows(path)))
        {
            notes.extend(left_out(folder, &format!("the folder `{}`", name(inner)), &entries, &[inner]));
            return self::folder(inner, wanted, notes);
        }
        if files.is_empty() {
            let only = format!(", only the folders {}: name the one to read", self::names(&folders));
            let there = if folders.is_empty() { "" } else { &only };
            let message = format!("the folder holds no files of data for the split `{}`{there}", wanted.name());
            return Err(faults::bad_source(folder, &message));
        }
    }
    let of_split = |path: &Path| SplitName::of(&name(path));
    if files.iter().any(|path| of_split(path).is_some()) {
        files.retain(|path| of_split(path) == Some(wanted));
    }
    if files.is_empty() {
        return Err(faults::bad_source(folder, &format!("no file of the folder is called `{}`", wanted.name())));
    }
    let splits = distinct(files.iter().filter_map(|path| split_of_shard(&name(path))));
    if let Some(at) = only_split(folder, &splits, wanted)? {
        files.retain(|path| split_of_shard(&name(path)).is_none_or(|split| split == splits[at]));
    }
    all_shards(folder, &files)?;
    notes.extend(left_out(folder, &format!("the split `{}`", wanted.name()), &entries, &files));
    Ok(files.into_iter().cloned().collect())
}

/// Which of some names is that of a split: the one that is just called so, or the only one that says so.
fn only_split(folder: &Path, names: &[String], wanted: SplitName) -> Result<Option<usize>, Fault> {
    let all: Vec<usize> = (0..names.len()).filter(|&at| SplitName::of(&names[at]) == Some(wanted)).collect();
    match (all.iter().find(|&&at| names[at] == wanted.name()), &all[..]) {
        (Some(at), _) | (None, [at]) => Ok(Some(*at)),
        (None, []) => Ok(None),
        (None, several) => {
            let several = listed(several.iter().map(|&at| format!("`{}`", names[at])));
            Err(faults::bad_source(folder, &format!("{several} are all of the split `{}`: name the one to read", wanted.name())))
        }
    }
}

/// As in `datasets`, the split of a shard such as `train_sft-00000-of-00003.parquet`: one word before the numbers.
fn split_of_shard(name: &str) -> Option<String> {
    let (split, rest) = name.split_once('-')?;
    (rest.starts_with(|sign: char| sign.is_ascii_digit()) && rest.contains("-of-")).then(|| split.to_owned())
}

/// What a folder shows, in the order of the names.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, Fault> {
    let mut entries: Vec<PathBuf> = std::fs::read_dir(folder)
        .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.path())).collect())
        .map_err(faults::read(folder))?;
    entries.retain(|path| !name(path).starts_with('.') && !name(path).ends_with(".tokens"));
    entries.sort();
    Ok(entries)
}

fn is_rows(path: &Path) -> bool {
    ROWS.contains(&inner_extension(path).as_str()) && !ABOUT.contains(&name(path).as_str()) && path.is_file()
}

fn is_document(path: &Path) -> bool {
    DOCUMENTS.contains(&inner_extension(path).as_str()) && !describes_folder(path) && path.is_file()
}

fn describes_folder(path: &Path) -> bool {
    let stem = name(path).split('.').next().unwrap_or_default().to_ascii_lowercase();
    ABOUT_FOLDER.contains(&stem.as_str()) && !ROWS.contains(&inner_extension(path).as_str())
}

/// A note on a folder's entries beside those that are read.
fn left_out(folder: &Path, read: &str, entries: &[PathBuf], chosen: &[&PathBuf]) -> Option<String> {
    let chosen: HashSet<&PathBuf> = chosen.iter().copied().collect();
    let left: Vec<&PathBuf> = entries.iter().filter(|path| !chosen.contains(path)).collect();
    (!left.is_empty()).then(|| format!("of the folder `{}` {read} is read, not {}", folder.display(), names(&left)))
}

fn names(paths: &[&PathBuf]) -> String {
    listed(paths.iter().map(|path| format!("`{}`", name(path))))
}

fn name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Where there is `train-00000-of-00007.parquet` there must be 7, as of `train-00000-of-00007-0123456789abcdef.parquet`.
fn all_shards(folder: &Path, files: &[&PathBuf]) -> Result<(), Fault> {
    let mut shards: BTreeMap<(String, String, String), BTreeSet<String>> = BTreeMap::new();
    for name in files.iter().map(|path| name(path)) {
        let Some((stem, rest)) = name.rsplit_once("-of-") else { continue };
        let Some((start, number)) = stem.rsplit_once('-') else { continue };
        let (total, behind) = rest.split_at(rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len()));
        let extension = &behind[behind.find('.').unwrap_or(behind.len())..];
        if number.len() == total.len() && number.parse::<usize>().is_ok() && total.parse::<usize>().is_ok() {
            shards.entry((start.to_owned(), total.to_owned(), extension.to_owned())).or_default().insert(number.to_owned());
        }
    }
    for ((start, total, extension), numbers) in shards {
        let name = |number: usize| format!("{number:0width$}", width = total.len());
        if let Some(missing) = (0..total.parse().unwrap_or(0)).map(name).find(|number| !numbers.contains(number)) {
            return Err(faults::bad_source(folder, &format!("the shard `{start}-{missing}-of-{total}{extension}` is missing")));
        }
    }
    Ok(())
}

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

/// The files of a folder as `datasets` saves it with `save_to_disk`, one data set or several splits in a folder each; `None` of another folder.
fn saved_files(folder: &Path, wanted: SplitName) -> Result<Option<Vec<PathBuf>>, Fault> {
    if let Some(SavedSplits { splits }) = json(&folder.join("dataset_dict.json"))? {
        let Some(at) = only_split(folder, &splits, wanted)? else {
            let message = format!("it has no split `{}`, but {}", wanted.name(), splits.join(", "));
            return Err(faults::bad_source(folder, &message));
        };
        let of_split = folder.join(&splits[at]);
        let missing = || faults::bad_source(&of_split, "`state.json` of the split is missing");
        return shards(&of_split)?.ok_or_else(missing).map(Some);
    }
    shards(folder)
}

fn shards(folder: &Path) -> Result<Option<Vec<PathBuf>>, Fault> {
    let Some(SavedState { data_files, indices }) = json(&folder.join("state.json"))? else { return Ok(None) };
    if indices.is_some_and(|indices| !indices.is_null()) {
        let message = "its rows are chosen by a file of indices, which is not read: save it anew".to_owned();
        return Err(faults::bad_source(folder, &message));
    }
    if data_files.is_empty() {
        return Err(faults::bad_source(folder, "its `state.json` names no files"));
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
