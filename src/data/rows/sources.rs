//! What a recipe names, as files: a file, a pattern, a folder whose files are of several splits or shards, or several of these.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::input::is_data;
use super::saved;
use super::split_name::SplitName;
use crate::data::error::DataError;

/// Files of a folder that describe others.
const ABOUT: [&str; 4] = ["dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"];

/// Files in the order in which they are read.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::data) struct SourceFiles {
    pub(in crate::data) files: Vec<PathBuf>,
    /// What was left out of folders, in words.
    pub(in crate::data) notes: Vec<String>,
}

/// The files behind paths.
///
/// # Errors
/// One of them is not there, matches nothing, lacks a shard, or stands for a file that stands there already.
pub(in crate::data) fn find(paths: &[PathBuf], wanted: SplitName) -> Result<SourceFiles, DataError> {
    let mut found = SourceFiles::default();
    for path in paths {
        let is_pattern = !path.exists() && path.to_string_lossy().contains(['*', '?', '[']);
        if is_pattern {
            for matched in matches(path)? {
                add(&matched, wanted, &mut found)?;
            }
        } else {
            add(path, wanted, &mut found)?;
        }
    }
    let mut seen = Vec::new();
    for file in &found.files {
        let real = file.canonicalize().map_err(DataError::read(file))?;
        if seen.contains(&real) {
            return Err(DataError::bad_source(file, "it would be read twice".to_owned()));
        }
        seen.push(real);
    }
    Ok(found)
}

fn add(path: &Path, wanted: SplitName, found: &mut SourceFiles) -> Result<(), DataError> {
    if std::fs::metadata(path).map_err(DataError::read(path))?.is_dir() {
        folder(path, wanted, found)
    } else {
        found.files.push(path.to_path_buf());
        Ok(())
    }
}

fn matches(pattern: &Path) -> Result<Vec<PathBuf>, DataError> {
    let bad = |message: String| DataError::bad_source(pattern, message);
    let paths = glob::glob(&pattern.to_string_lossy()).map_err(|error| bad(format!("it is no pattern: {error}")))?;
    let mut paths: Vec<PathBuf> = paths.collect::<Result<_, _>>().map_err(|error| bad(error.to_string()))?;
    paths.retain(|path| !name(path).ends_with(".tokens"));
    if paths.is_empty() { Err(bad("no file matches it".to_owned())) } else { Ok(paths) }
}

fn folder(folder: &Path, wanted: SplitName, found: &mut SourceFiles) -> Result<(), DataError> {
    if let Some(files) = saved::files(folder, wanted)? {
        found.files.extend(files);
        return Ok(());
    }
    let mut entries: Vec<PathBuf> = std::fs::read_dir(folder)
        .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.path())).collect())
        .map_err(DataError::read(folder))?;
    entries.retain(|path| !name(path).starts_with('.') && !name(path).ends_with(".tokens"));
    entries.sort();
    let is_file = |path: &&PathBuf| path.is_file() && is_data(path) && !ABOUT.contains(&name(path).as_str());
    let files: Vec<&PathBuf> = entries.iter().filter(is_file).collect();
    if files.is_empty() {
        let split = entries.iter().find(|path| path.is_dir() && SplitName::of(&name(path)) == Some(wanted));
        return match split.or_else(|| entries.iter().find(|path| path.is_dir() && name(path) == "data")) {
            Some(inner) => self::folder(inner, wanted, found),
            None => Err(DataError::bad_source(folder, format!("the folder holds no files of data for the split `{wanted}`"))),
        };
    }
    let of_split = |path: &&PathBuf| SplitName::of(&name(path));
    let has_splits = files.iter().any(|path| of_split(path).is_some());
    let chosen: Vec<PathBuf> =
        files.iter().filter(|path| !has_splits || of_split(path) == Some(wanted)).map(|&path| path.clone()).collect();
    if chosen.is_empty() {
        return Err(DataError::bad_source(folder, format!("no file of the folder is called `{wanted}`")));
    }
    all_shards(folder, &chosen)?;
    let left: Vec<String> =
        entries.iter().filter(|path| !chosen.contains(path)).map(|path| format!("`{}`", name(path))).collect();
    if !left.is_empty() {
        let more = if left.len() > 5 { format!(" and {} more", left.len() - 5) } else { String::new() };
        let listed = left[..left.len().min(5)].join(", ");
        found.notes.push(format!("of the folder `{}` the split `{wanted}` is read, not {listed}{more}", folder.display()));
    }
    found.files.extend(chosen);
    Ok(())
}

fn name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Of `train-00000-of-00007.parquet` there must be 7.
fn all_shards(folder: &Path, files: &[PathBuf]) -> Result<(), DataError> {
    let mut shards: BTreeMap<(String, String, String), Vec<String>> = BTreeMap::new();
    for name in files.iter().map(|path| name(path)) {
        let Some((stem, rest)) = name.rsplit_once("-of-") else { continue };
        let Some((start, number)) = stem.rsplit_once('-') else { continue };
        let (total, extension) = rest.split_at(rest.find('.').unwrap_or(rest.len()));
        if number.len() == total.len() && number.parse::<usize>().is_ok() && total.parse::<usize>().is_ok() {
            shards.entry((start.to_owned(), total.to_owned(), extension.to_owned())).or_default().push(number.to_owned());
        }
    }
    for ((start, total, extension), numbers) in shards {
        let name = |number: usize| format!("{number:0width$}", width = total.len());
        if let Some(missing) = (0..total.parse().unwrap_or(0)).map(name).find(|number| !numbers.contains(number)) {
            return Err(DataError::bad_source(folder, format!("the shard `{start}-{missing}-of-{total}{extension}` is missing")));
        }
    }
    Ok(())
}
