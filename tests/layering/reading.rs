//! Files are read through the one door of `files`, which refuses what is no regular file or too large.

use super::{assert_clean, sources};

/// What opens or reads a file past the door.
const PAST_THE_DOOR: [&str; 6] =
    ["File::open(", "fs::read(", "fs::read_to_string(", ".read(true)", "fs::read,", "fs::read_to_string,"];

/// The door itself; directories that are synced or locked; and files that are written to as well, which their writers have made.
const MAY: [&str; 4] = ["files/open.rs", "files/disk.rs", "files/lock.rs", "files/scratch.rs"];

#[test]
fn every_file_is_read_through_the_door() {
    assert_clean(reads_past_the_door);
    for name in MAY {
        assert!(sources().iter().any(|(file, _)| file == name), "{name} is gone");
    }
}

#[test]
fn each_way_past_the_door_is_seen() {
    for line in [
        "let file = File::open(path);",
        "let bytes = std::fs::read(path);",
        "let text = fs::read_to_string(path)?;",
        "OpenOptions::new().read(true).open(path)",
        "use std::{fs::read, io};",
    ] {
        assert_eq!(reads_past_the_door("data/x.rs", line).len(), 1, "{line}");
    }
    for line in ["TensorFile::open(path)", "fs::read_dir(path)", "// fs::read(", "#[cfg(test)]\nmod tests {\nfs::read(path)"] {
        assert_eq!(reads_past_the_door("data/x.rs", line), Vec::<String>::new(), "{line}");
    }
}

/// What the system says of itself, `native` reads as it likes.
fn reads_past_the_door(file: &str, source: &str) -> Vec<String> {
    if MAY.contains(&file) || file.starts_with("native/") || file.ends_with("tests.rs") {
        return Vec::new();
    }
    let code = source.split("mod tests {").next().unwrap_or(source);
    let is_own = |line: &str, at: usize| !line[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_');
    let past = |line: &str| PAST_THE_DOOR.iter().any(|way| line.find(way).is_some_and(|at| is_own(line, at)));
    let lines = code.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//") && past(line));
    lines.map(|(at, line)| format!("src/{file}:{}: read it with `files::open_to_read`: {}", at + 1, line.trim())).collect()
}
