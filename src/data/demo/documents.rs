//! Finds long documents that are on this machine anyway: licences, manual pages, package and library documentation.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use flate2::read::MultiGzDecoder;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha12Rng;

use super::{html, roff};

/// A shorter text makes no document.
const MIN_CHARACTERS: usize = 4_000;

/// Of a longer one, this beginning is read: a single file must not make up the whole data.
pub(super) const MAX_CHARACTERS: usize = 120_000;

/// Bytes read of a file at most, unpacked.
const MAX_BYTES: u64 = 2 << 20;

/// Documents taken of one family (files in a folder whose names begin with the same word): generated pages repeat each other.
const MAX_PER_FAMILY: usize = 6;

/// A text and where it comes from.
#[derive(Clone, Debug)]
pub(super) struct DemoDocument {
    /// Its last two path components.
    pub(super) title: String,
    /// Index of its source.
    pub(super) source: usize,
    pub(super) text: String,
}

/// A folder of documents.
#[derive(Clone, Debug)]
pub(super) struct DocumentSource {
    pub(super) name: String,
    folder: PathBuf,
    /// Used only when the other sources are exhausted.
    is_last_resort: bool,
}

impl DocumentSource {
    pub(super) fn new(name: &str, folder: impl Into<PathBuf>) -> Self {
        Self { name: name.to_owned(), folder: folder.into(), is_last_resort: false }
    }
}

/// The usual places, the best texts first; sources of libraries last.
pub(super) fn usual_sources() -> Vec<DocumentSource> {
    let mut sources = vec![DocumentSource::new("licences", "/usr/share/common-licenses")];
    sources
        .extend((1..9).map(|section| DocumentSource::new(&format!("manual-{section}"), format!("/usr/share/man/man{section}"))));
    sources.push(DocumentSource::new("packages", "/usr/share/doc"));
    if let Some(sysroot) = sysroot() {
        sources.push(DocumentSource::new("toolchain", sysroot.join("share/doc")));
        sources.push(DocumentSource::new("library", sysroot.join("lib/rustlib/src")));
    }
    if let Some(libtorch) = std::env::var_os("LIBTORCH") {
        sources.push(DocumentSource::new("libtorch", Path::new(&libtorch).join("include")));
    }
    let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo"));
    if let Some(cargo) = std::env::var_os("CARGO_HOME").map(PathBuf::from).or(home) {
        sources.push(DocumentSource { is_last_resort: true, ..DocumentSource::new("crates", cargo.join("registry/src")) });
    }
    sources.retain(|source| source.folder.is_dir());
    sources
}

fn sysroot() -> Option<PathBuf> {
    let output = Command::new("rustc").args(["--print", "sysroot"]).output().ok()?;
    Some(PathBuf::from(String::from_utf8(output.stdout).ok()?.trim()))
}

/// Documents of about `wanted` characters altogether (fewer if there are no more), drawn by `seed`, evenly over the sources.
pub(super) fn collect(sources: &[DocumentSource], wanted: usize, seed: u64) -> Vec<DemoDocument> {
    let mut queues: Vec<Vec<PathBuf>> =
        sources.iter().enumerate().map(|(index, source)| candidates(source, seed ^ index as u64)).collect();
    let mut taken = vec![0; sources.len()];
    let mut seen = HashSet::new();
    let mut documents = Vec::new();
    // Always from the source that gave least so far: no kind of text crowds out the others.
    while let Some(source) =
        (0..sources.len()).filter(|&s| !queues[s].is_empty()).min_by_key(|&s| (sources[s].is_last_resort, taken[s]))
    {
        if taken.iter().sum::<usize>() >= wanted {
            break;
        }
        let Some(path) = queues[source].pop() else { break };
        let Some(text) = read_text(&path) else { continue };
        if !seen.insert(blake3::hash(text.as_bytes())) {
            continue;
        }
        taken[source] += text.len();
        documents.push(DemoDocument { title: title(&path), source, text });
    }
    documents
}

/// Readable files of a source, at most a few of each family, in an order drawn by `seed`.
fn candidates(source: &DocumentSource, seed: u64) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    walk(&source.folder, 0, &mut paths);
    paths.sort();
    paths.shuffle(&mut ChaCha12Rng::seed_from_u64(seed));
    let mut families: HashMap<PathBuf, usize> = HashMap::new();
    paths.retain(|path| {
        let count = families.entry(family(path)).or_default();
        *count += 1;
        *count <= MAX_PER_FAMILY
    });
    paths
}

fn walk(folder: &Path, depth: usize, paths: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        // Links lead to what is found elsewhere, or in circles.
        if kind.is_dir() && depth < 12 {
            walk(&entry.path(), depth + 1, paths);
        } else if kind.is_file() && TextFormat::of(&entry.path()).is_some() {
            paths.push(entry.path());
        }
    }
}

fn family(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let word: String = name.chars().take_while(|c| c.is_alphanumeric()).collect();
    path.with_file_name(word)
}

fn title(path: &Path) -> String {
    let parts: Vec<_> = path.components().rev().take(2).map(|part| part.as_os_str().to_string_lossy().into_owned()).collect();
    let title = parts.into_iter().rev().collect::<Vec<_>>().join("/");
    title.strip_suffix(".gz").map_or(title.clone(), str::to_owned)
}

/// How a file's text is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TextFormat {
    Plain,
    Roff,
    Html,
}

impl TextFormat {
    fn of(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?;
        let name = name.strip_suffix(".gz").unwrap_or(name);
        // Copyright files repeat the licences, changelogs are lists of names and numbers.
        if name == "copyright" || name.starts_with("changelog") {
            return None;
        }
        let is_manual = path.parent()?.file_name()?.to_str()?.starts_with("man");
        match name.rsplit_once('.') {
            Some((_, extension)) if is_manual && extension.starts_with(|c: char| c.is_ascii_digit()) => Some(Self::Roff),
            Some((_, "html" | "htm")) => Some(Self::Html),
            None | Some((_, "md" | "txt" | "rst" | "h" | "hpp" | "rs")) => Some(Self::Plain),
            // `GPL-2.1`, `README.Debian`: a dot in the name of a text.
            Some((_, extension)) if extension == "Debian" || extension.bytes().all(|b| b.is_ascii_digit()) => Some(Self::Plain),
            Some(_) => None,
        }
    }
}

/// A file's text, tidied up; `None` where it is too short, is not text or cannot be read.
fn read_text(path: &Path) -> Option<String> {
    let form = TextFormat::of(path)?;
    let file = File::open(path).ok()?;
    let mut bytes = Vec::new();
    if path.extension().is_some_and(|extension| extension == "gz") {
        MultiGzDecoder::new(file).take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    } else {
        file.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    }
    if bytes.len() < MIN_CHARACTERS || bytes.contains(&0) {
        return None;
    }
    let text = String::from_utf8_lossy(&bytes);
    if text.matches('\u{fffd}').count() > 8 {
        return None;
    }
    let text = match form {
        TextFormat::Plain => text.into_owned(),
        TextFormat::Roff => roff::to_text(&text),
        TextFormat::Html => html::to_text(&text),
    };
    let text = tidy(&text);
    (text.len() >= MIN_CHARACTERS).then_some(text)
}

/// Drops control characters, trailing blanks and rows of empty lines; cuts at a line's end what is too long.
fn tidy(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        if out.len() >= MAX_CHARACTERS {
            break;
        }
        let line: String = line.chars().filter(|&c| c == '\t' || !c.is_control()).collect();
        let line = line.trim_end();
        if !line.is_empty() || !out.ends_with("\n\n") {
            out.push_str(line);
            out.push('\n');
        }
    }
    out.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn reads_what_is_text_and_skips_the_rest() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("man1");
        std::fs::create_dir(&folder).unwrap();
        let page = format!(".SH NAME\n{}", "ls \\- list contents\n".repeat(300));
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        packed.write_all(page.as_bytes()).unwrap();
        std::fs::write(folder.join("ls.1.gz"), packed.finish().unwrap()).unwrap();
        std::fs::write(folder.join("broken.1.gz"), b"not gzip").unwrap();
        std::fs::write(dir.path().join("README"), "A line of plain text.\n\n\n\n".repeat(300)).unwrap();
        std::fs::write(dir.path().join("copy.txt"), "A line of plain text.\n\n\n\n".repeat(300)).unwrap();
        std::fs::write(dir.path().join("short.md"), "too short").unwrap();
        std::fs::write(dir.path().join("binary.txt"), [0; 9000]).unwrap();
        std::fs::write(dir.path().join("program.exe"), "x".repeat(9000)).unwrap();
        let sources = [DocumentSource::new("all", dir.path())];
        let documents = collect(&sources, usize::MAX, 3);
        let mut titles: Vec<&str> = documents.iter().map(|document| document.title.rsplit('/').next().unwrap()).collect();
        titles.sort_unstable();
        assert_eq!(titles.len(), 2, "{titles:?}");
        assert_eq!(titles[1], "ls.1");
        assert!(documents.iter().all(|document| !document.text.contains("\n\n\n")));
        let again = collect(&sources, usize::MAX, 3);
        assert!(documents.iter().zip(&again).all(|(a, b)| a.text == b.text));
    }
}
