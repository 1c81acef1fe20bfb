//! Opening a file of rows: packed or not, and which kind it is.

use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use regex::Regex;
use serde::de::IgnoredAny;

use crate::data::faults;
use crate::files::{FileKind, open_to_read};
use crate::units::{Fault, quoted};

/// Bytes that are looked at to find out what a file is.
const BEGINNING: u64 = 1 << 16;

const BUFFER: usize = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A JSON object a line.
    Lines,
    /// One JSON array of objects.
    Array,
    Csv(u8),
    Parquet,
    Arrow,
    /// Plain text: all of it is one row.
    Document,
}

pub(super) struct Input {
    pub(super) path: PathBuf,
    pub(super) reader: Box<dyn BufRead>,
    packing: Option<&'static str>,
    /// Where the records may be, if the file is one object.
    array_within: Option<String>,
}

impl Input {
    /// What an error of the reader means: of the system, or of a packed file that is damaged.
    pub(super) fn error(&self, error: io::Error) -> Fault {
        error_of(&self.path, self.packing, error)
    }

    pub(super) fn one_object(&self) -> Fault {
        let within = self.array_within.as_ref().map(|field| format!(", whose field `{field}` is an array"));
        let message = format!("expected an array of records, found one object{}", within.unwrap_or_default());
        faults::unreadable(&self.path, "JSON", &message)
    }
}

fn error_of(path: &Path, packing: Option<&'static str>, error: io::Error) -> Fault {
    match packing {
        Some(packing) if error.raw_os_error().is_none() => {
            let cut_off = if error.kind() == io::ErrorKind::UnexpectedEof { "it ends too early: " } else { "" };
            faults::unreadable(path, packing, &format!("{cut_off}{error}"))
        }
        _ => faults::read(path)(error),
    }
}

/// A reader by what it does.
pub(super) struct ReadBy<F>(pub(super) F);

impl<F: FnMut(&mut [u8]) -> io::Result<usize>> Read for ReadBy<F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0(buffer)
    }
}

/// Opens a file; a mark of the byte order at its beginning is skipped.
pub(super) fn open(path: &Path) -> Result<(Kind, Input), Fault> {
    let file = open_to_read(path, FileKind::Data)?;
    let (beginning, reader) = peek(BufReader::with_capacity(BUFFER, file), 4).map_err(faults::read(path))?;
    let extension = extension(path);
    let (packing, reader): (_, Box<dyn BufRead>) = match (&beginning[..], extension.as_str()) {
        ([0x1f, 0x8b, ..], _) | (_, "gz") => {
            (Some("gzip"), Box::new(BufReader::with_capacity(BUFFER, MultiGzDecoder::new(reader))))
        }
        ([0x28, 0xb5, 0x2f, 0xfd] | [0x50..=0x5f, 0x2a, 0x4d, 0x18], _) | (_, "zst") => {
            let decoder = zstd::Decoder::with_buffer(reader).map_err(|error| error_of(path, Some("zstd"), error))?;
            (Some("zstd"), Box::new(BufReader::with_capacity(BUFFER, decoder)))
        }
        _ => (None, Box::new(reader)),
    };
    let (mut beginning, mut reader) = peek(reader, BEGINNING).map_err(|error| error_of(path, packing, error))?;
    if beginning.starts_with(b"\xef\xbb\xbf") {
        beginning.drain(..3);
        reader.consume(3);
    }
    let inner = path.with_extension("");
    let kind = kind(&beginning, if packing.is_some() { &inner } else { path });
    if packing.is_some() && matches!(kind, Kind::Parquet | Kind::Arrow) {
        let message = format!("it holds {kind:?} data, which packs itself: unpack it").to_owned();
        return Err(faults::unreadable(path, packing.unwrap_or_default(), &message));
    }
    if !matches!(kind, Kind::Parquet | Kind::Arrow)
        && let Some(encoding) = encoding(&beginning)
    {
        return Err(faults::unreadable(path, "UTF-8", &format!("it is written in {encoding}")));
    }
    let may_be_one = kind == Kind::Lines && extension == "json";
    let array_within = if may_be_one { array_within(&beginning) } else { None };
    let input = Input { path: path.to_path_buf(), reader: Box::new(reader), packing, array_within };
    let text = beginning.trim_ascii_start();
    let line = text.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let is_cut = || serde_json::from_slice::<IgnoredAny>(line).is_err_and(|error| error.is_eof());
    if may_be_one && line.len() < text.len() && is_cut() { Err(input.one_object()) } else { Ok((kind, input)) }
}

/// The first bytes of what a reader gives, which it gives again.
fn peek<R: BufRead>(mut reader: R, count: u64) -> io::Result<(Vec<u8>, impl BufRead)> {
    let mut beginning = Vec::new();
    reader.by_ref().take(count).read_to_end(&mut beginning)?;
    Ok((beginning.clone(), Cursor::new(beginning).chain(reader)))
}

fn extension(path: &Path) -> String {
    path.extension().map(|extension| extension.to_string_lossy().to_ascii_lowercase()).unwrap_or_default()
}

fn kind(beginning: &[u8], path: &Path) -> Kind {
    let first = beginning.iter().find(|byte| !byte.is_ascii_whitespace());
    match (extension(path).as_str(), first) {
        _ if beginning.starts_with(b"PAR1") => Kind::Parquet,
        _ if beginning.starts_with(b"ARROW1") || beginning.starts_with(&[0xff; 4]) => Kind::Arrow,
        ("parquet", _) => Kind::Parquet,
        ("arrow" | "feather" | "ipc", _) => Kind::Arrow,
        ("csv", _) => Kind::Csv(delimiter(beginning)),
        ("tsv", _) => Kind::Csv(b'\t'),
        ("txt" | "md", _) => Kind::Document,
        (_, Some(b'[')) => Kind::Array,
        _ => Kind::Lines,
    }
}

/// What stands between the names in the first line: a comma, or what spreadsheets write instead.
fn delimiter(beginning: &[u8]) -> u8 {
    let names = beginning.split(|&byte| byte == b'\n').next().unwrap_or_default();
    [b',', b';', b'\t', b'|'].into_iter().find(|delimiter| names.contains(delimiter)).unwrap_or(b',')
}

/// What a text is written in, where that is another encoding than UTF-8 and its first bytes say so.
fn encoding(beginning: &[u8]) -> Option<&'static str> {
    match beginning {
        [0xff, 0xfe, 0, 0, ..] | [1..=255, 0, 0, 0, ..] => Some("UTF-32LE"),
        [0, 0, 0xfe, 0xff, ..] | [0, 0, 0, 1..=255, ..] => Some("UTF-32BE"),
        [0xff, 0xfe, ..] | [1..=255, 0, 1..=255, 0, ..] => Some("UTF-16LE"),
        [0xfe, 0xff, ..] | [0, 1..=255, 0, 1..=255, ..] => Some("UTF-16BE"),
        _ => None,
    }
}

/// The first field of a JSON object that is an array, where only plain values stand before it.
fn array_within(beginning: &[u8]) -> Option<String> {
    let value = r#"(?:"(?:[^"\\]|\\.)*"|[-+.\w]+)"#;
    let field = Regex::new(&format!(r#"^\s*\{{(?:\s*"[^"\\]*"\s*:\s*{value}\s*,)*\s*"([^"\\]+)"\s*:\s*\["#)).ok()?;
    field.captures(&String::from_utf8_lossy(beginning)).map(|found| quoted(&found[1]))
}

/// The extension of what a file is once it is unpacked.
pub(super) fn inner_extension(path: &Path) -> String {
    let outer = extension(path);
    if matches!(outer.as_str(), "gz" | "zst") { extension(&path.with_extension("")) } else { outer }
}
