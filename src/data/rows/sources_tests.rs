//! The files behind folders, patterns and lists.

use std::fs;
use std::path::{Path, PathBuf};

use super::{SplitName, find};

/// A folder of empty files, but for these.
fn folder(names: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in names {
        let (name, content) = name.split_once('=').unwrap_or((name, ""));
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    dir
}

/// The files behind a path below a folder, in words.
fn found(dir: &Path, paths: &[&str], split: SplitName) -> Result<Vec<String>, String> {
    let words = |text: String| text.replace(&format!("{}/", dir.display()), "").replace(&dir.display().to_string(), ".");
    let paths: Vec<PathBuf> = paths.iter().map(|path| dir.join(path)).collect();
    let mut notes = Vec::new();
    let files = find(&paths, split, &mut notes).map_err(|error| words(error.to_string()))?;
    Ok(files.iter().map(|file| file.display().to_string()).chain(notes).map(words).collect())
}

#[test]
fn folders_patterns_and_lists() {
    use SplitName::{Test, Train, Validation};
    let dir = folder(&[
        "d/train-00001-of-00002.parquet",
        "d/train-00000-of-00002.parquet",
        "d/dev.jsonl",
        "d/README",
        "e/b.csv",
        "e/a.jsonl.gz",
    ]);
    let found = |paths: &[&str], split| found(dir.path(), paths, split);
    let note = "of the folder `d` the split `train` is read, not `README`, `dev.jsonl`";
    assert_eq!(found(&["d"], Train).unwrap(), ["d/train-00000-of-00002.parquet", "d/train-00001-of-00002.parquet", note]);
    assert_eq!(found(&["d"], Validation).unwrap()[0], "d/dev.jsonl");
    assert_eq!(found(&["d"], Test), Err("`d`: no file of the folder is called `test`".to_owned()));
    let numbered = folder(&["n/train1.jsonl", "n/train2.jsonl", "n/valid1.jsonl"]);
    assert_eq!(self::found(numbered.path(), &["n"], Validation).unwrap()[0], "n/valid1.jsonl");
    assert_eq!(self::found(numbered.path(), &["n"], Train).unwrap()[..2], ["n/train1.jsonl", "n/train2.jsonl"]);
    assert_eq!(found(&["e", "d/dev.jsonl"], Validation).unwrap(), ["e/a.jsonl.gz", "e/b.csv", "d/dev.jsonl"]);
    assert_eq!(found(&["*/*.jsonl*"], Train).unwrap(), ["d/dev.jsonl", "e/a.jsonl.gz"]);
    assert_eq!(found(&["*/x*"], Train), Err("`*/x*`: no file matches it".to_owned()));
    assert_eq!(found(&["e", "e/../e/b.csv"], Train), Err("`e/../e/b.csv`: it would be read twice".to_owned()));
    fs::remove_file(dir.path().join("d/train-00000-of-00002.parquet")).unwrap();
    assert_eq!(found(&["d"], Train), Err("`d`: the shard `train-00000-of-00002.parquet` is missing".to_owned()));
}

#[test]
fn folders_as_the_hub_has_them() {
    use SplitName::{Test, Train, Validation};
    let dir = folder(&[
        "hub/.gitattributes",
        "hub/README.md",
        "hub/LICENSE",
        "hub/data/train-00000-of-00002-0123456789abcdef.parquet",
        "hub/data/train-00001-of-00002-fedcba9876543210.parquet",
        "hub/data/test-00000-of-00001.parquet",
        "mixed/README.md",
        "mixed/notes.txt.gz",
        "mixed/a.jsonl",
        "sets/README.md",
        "sets/de/train.jsonl",
        "sets/en/train.jsonl",
        "split/notes.txt",
        "split/train/a.jsonl",
        "split/eval/a.jsonl",
        "card/README.md",
        "books/README.md",
        "books/a.txt",
        "books/data/figure.png",
        "only/eval.jsonl",
    ]);
    let found = |path: &str, split| found(dir.path(), &[path], split);
    let shards = ["0-of-00002-0123456789abcdef", "1-of-00002-fedcba9876543210"];
    let shards = shards.map(|shard| format!("hub/data/train-0000{shard}.parquet"));
    let top = "of the folder `hub` the folder `data` is read, not `LICENSE`, `README.md`";
    let inner = "of the folder `hub/data` the split `train` is read, not `test-00000-of-00001.parquet`";
    assert_eq!(found("hub", Train).unwrap(), [shards[0].as_str(), &shards[1], top, inner]);
    assert_eq!(found("hub", Test).unwrap()[0], "hub/data/test-00000-of-00001.parquet");
    assert_eq!(found("hub", Validation), Err("`hub/data`: no file of the folder is called `validation`".to_owned()));
    fs::remove_file(dir.path().join(&shards[1])).unwrap();
    assert_eq!(found("hub", Train), Err("`hub/data`: the shard `train-00001-of-00002.parquet` is missing".to_owned()));
    let note = "of the folder `mixed` the split `train` is read, not `README.md`, `notes.txt.gz`";
    assert_eq!(found("mixed", Train).unwrap(), ["mixed/a.jsonl", note]);
    let note = "of the pattern `mixed/*` `README.md` is not read: it describes the others";
    assert_eq!(found("mixed/*", Train).unwrap(), ["mixed/a.jsonl", "mixed/notes.txt.gz", note]);
    assert_eq!(found("card/*", Train).unwrap(), ["card/README.md"]);
    let none = "the folder holds no files of data for the split `train`";
    assert_eq!(found("sets", Train), Err(format!("`sets`: {none}, only the folders `de`, `en`: name the one to read")));
    assert_eq!(found("card", Train), Err(format!("`card`: {none}")));
    let note = "of the folder `split` the folder `train` is read, not `eval`, `notes.txt`";
    assert_eq!(found("split", Train).unwrap(), ["split/train/a.jsonl", note]);
    let note = "of the folder `books` the split `train` is read, not `README.md`, `data`";
    assert_eq!(found("books", Train).unwrap(), ["books/a.txt", note]);
    assert_eq!(found("only", Train), Err("`only`: no file of the folder is called `train`".to_owned()));
}

#[test]
fn folders_as_datasets_saves_them() {
    let state = "state.json={\"_data_files\": [{\"filename\": \"data-0.arrow\"}, {\"filename\": \"data-1.arrow\"}]}";
    let saved = ["data-0.arrow", "data-1.arrow", "cache-9.arrow", "dataset_info.json={}", state];
    let dict = "d/dataset_dict.json={\"splits\": [\"train\", \"test\"]}";
    let within: Vec<String> = saved.iter().map(|name| format!("d/train/{name}")).collect();
    let names: Vec<&str> = saved
        .into_iter()
        .chain(within.iter().map(String::as_str))
        .chain([dict, "none/state.json={\"_data_files\": []}"])
        .collect();
    let dir = folder(&names);
    let found = |paths: &[&str], split| found(dir.path(), paths, split);
    assert_eq!(found(&["."], SplitName::Train).unwrap(), ["./data-0.arrow", "./data-1.arrow"]);
    assert_eq!(found(&["d"], SplitName::Train).unwrap(), ["d/train/data-0.arrow", "d/train/data-1.arrow"]);
    assert_eq!(found(&["d"], SplitName::Validation), Err("`d`: it has no split `validation`, but train, test".to_owned()));
    assert_eq!(found(&["d"], SplitName::Test), Err("`d/test`: `state.json` of the split is missing".to_owned()));
    assert_eq!(found(&["none"], SplitName::Train), Err("`none`: its `state.json` names no files".to_owned()));
    // The one that is just called so is meant, and of others there may be one.
    for (splits, wrong) in [("train_sft train_gen test", true), ("train_sft train test", false), ("train_sft test", false)] {
        let [dict, state] = ["two/dict", "saved/dict"].map(|place| dir.path().join(place));
        for split in splits.split(' ') {
            fs::create_dir_all(dict.join(split)).unwrap();
            fs::create_dir_all(state.join(split)).unwrap();
            fs::write(dict.join(split).join("rows.jsonl"), "").unwrap();
            fs::create_dir_all(dir.path().join("two/shards")).unwrap();
            fs::write(dir.path().join(format!("two/shards/{split}-00000-of-00001.jsonl")), "").unwrap();
            fs::write(state.join(split).join("data-0.arrow"), "").unwrap();
            fs::write(state.join(split).join("state.json"), "{\"_data_files\": [{\"filename\": \"data-0.arrow\"}]}").unwrap();
        }
        let names: Vec<&str> = splits.split(' ').collect();
        fs::write(state.join("dataset_dict.json"), serde_json::json!({"splits": names}).to_string()).unwrap();
        for place in ["two/dict", "two/shards", "saved/dict"] {
            let found = found(&[place], SplitName::Train);
            assert_eq!(found.is_err(), wrong, "{found:?}");
            let text = found.map_or_else(|error| error, |files| files.concat());
            assert!(text.contains("train") && wrong == text.contains(" are all of the split `train`"), "{text}");
            assert!(wrong || (text.contains("/train/") || text.contains("/train-")) == names.contains(&"train"), "{text}");
        }
        fs::remove_dir_all(dir.path().join("two")).unwrap();
    }
    fs::remove_file(dir.path().join("d/train/data-1.arrow")).unwrap();
    assert_eq!(found(&["d"], SplitName::Train), Err("`d/train`: the shard `data-1.arrow` is missing".to_owned()));
}
