//! Answers on disk, a JSON object per line: what was interrupted goes on behind the last whole line, and ends with the same file.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::ScoredAnswer;
use crate::files::disk::DiskFile;
use crate::files::{self, FileKind, io_fault};
use crate::units::{Fault, abridged, quoted};

/// The folder of a run that keeps answers.
pub const ANSWERS: &str = "answers";

/// A file of answers, open for more.
#[derive(Debug)]
pub struct AnswerFile {
    path: PathBuf,
    file: DiskFile,
    /// What it held when it was opened, as far as nobody has taken it.
    kept: std::vec::IntoIter<Row>,
    taken: usize,
}

#[derive(Debug, Serialize, Deserialize)]
struct Row {
    #[serde(flatten)]
    answer: ScoredAnswer,
    settings: Value,
}

impl AnswerFile {
    /// Opens a file, or begins one, and keeps other processes from writing into it. A last line that was cut short is removed.
    pub fn open(path: &Path) -> Result<Self, Fault> {
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            files::make_dir(folder)?;
        }
        if path.exists() {
            // A pipe would be waited for.
            files::open_to_read(path, FileKind::Lines)?;
        }
        let open = DiskFile::open("answers", path, OpenOptions::new().append(true).create(true));
        let file = open.map_err(io_fault("open", path))?;
        // Two that append would each write every answer.
        files::lock_file(file.as_file(), path)?;
        let bytes = files::read_bytes(path, FileKind::Lines)?;
        let (kept, end) = whole_rows(path, &bytes)?;
        file.set_len(end as u64).map_err(io_fault("write", path))?;
        Ok(Self { path: path.to_owned(), file, kept: kept.into_iter(), taken: 0 })
    }

    /// The answers of a file, and the settings of the first; what was cut short at the end is left out. Changes nothing.
    pub fn read(path: &Path) -> Result<(Vec<ScoredAnswer>, Value), Fault> {
        let bytes = files::read_bytes(path, FileKind::Lines)?;
        let rows = whole_rows(path, &bytes)?.0;
        let settings = rows.first().map_or(Value::Null, |row| row.settings.clone());
        Ok((rows.into_iter().map(|row| row.answer).collect(), settings))
    }

    /// Writes a file of answers whole, in place of one that is there.
    pub fn write(path: &Path, settings: &Value, answers: &[ScoredAnswer]) -> Result<(), Fault> {
        if let Some(folder) = path.parent() {
            files::make_dir(folder)?;
        }
        let lines: Result<Vec<Vec<u8>>, Fault> = answers.iter().map(|answer| line(path, settings, answer)).collect();
        files::write_atomic(path, &lines?.concat())
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn taken(&self) -> usize {
        self.taken
    }

    /// The next answer that it holds, which must be one to this sample with these settings; `None` behind the last.
    pub(super) fn take(&mut self, settings: &Value, sample: u64, prompt: &str) -> Result<Option<ScoredAnswer>, Fault> {
        let Some(Row { answer, settings: found }) = self.kept.next() else { return Ok(None) };
        self.taken += 1;
        let mut parts: Vec<(&str, Value, Value)> = Vec::new();
        for (key, expected) in settings.as_object().into_iter().flatten() {
            parts.push((key, expected.clone(), found[key].clone()));
        }
        parts.push(("settings", settings.clone(), found));
        parts.push(("sample", sample.into(), answer.sample.into()));
        parts.push(("prompt_hash", prompt.into(), answer.prompt_hash.clone().into()));
        if let Some((what, expected, found)) = parts.into_iter().find(|(_, expected, found)| expected != found) {
            let (place, line, found) = (abridged(self.path.display()), self.taken, quoted(found));
            let message = format!("`{place}`, line {line}: an answer with another `{what}`: expected {expected}, found {found}");
            return Err(Fault::data(message, NAME_ANOTHER));
        }
        Ok(Some(answer))
    }

    /// Appends an answer, and makes it durable.
    pub(super) fn append(&mut self, settings: &Value, answer: &ScoredAnswer) -> Result<(), Fault> {
        let line = line(&self.path, settings, answer)?;
        let written = self.file.write_all(&line).and_then(|()| self.file.sync());
        written.map_err(io_fault("write", &self.path))
    }

    /// Fails where it holds answers that nobody asked for.
    pub fn finish(mut self) -> Result<(), Fault> {
        let more = self.kept.next().is_some();
        let (place, asked) = (abridged(self.path.display()), self.taken);
        let refused = || Fault::data(format!("`{place}` holds more than the {asked} answers that are asked for"), NAME_ANOTHER);
        if more { Err(refused()) } else { Ok(()) }
    }
}

const NAME_ANOTHER: &str = "name another file with `--answers`, or remove this one to begin anew";

fn line(path: &Path, settings: &Value, answer: &ScoredAnswer) -> Result<Vec<u8>, Fault> {
    let row = Row { answer: answer.clone(), settings: settings.clone() };
    let mut line = serde_json::to_vec(&row).map_err(|error| io_fault("write", path)(error.into()))?;
    line.push(b'\n');
    Ok(line)
}

/// The rows of a file's whole lines, and where these end.
fn whole_rows(path: &Path, bytes: &[u8]) -> Result<(Vec<Row>, usize), Fault> {
    let (mut rows, mut end) = (Vec::new(), 0);
    while let Some(len) = bytes[end..].iter().position(|&byte| byte == b'\n') {
        let row = serde_json::from_slice(&bytes[end..end + len]).map_err(|error| {
            // The parser counts lines within what it was given, which is one.
            let (error, place) = (error.to_string(), abridged(path.display()));
            let why = abridged(error.split(" at line ").next().unwrap_or_default());
            Fault::data(format!("`{place}`, line {}: not an answer of an evaluation: {why}", rows.len() + 1), NAME_ANOTHER)
        })?;
        rows.push(row);
        end += len + 1;
    }
    Ok((rows, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_waited_for_at_the_end_of_a_pipe() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        for (path, what) in [(&*pipe, "is a pipe"), (Path::new("/dev/null"), "is a device")] {
            let error = AnswerFile::open(path).map(drop).unwrap_err();
            assert!(error.to_string().contains(what), "{error}");
        }
    }
}
