//! Opening a file of rows: packed or not, and which kind it is.

use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;

use crate::data::error::DataError;
use crate::files::{FileKind, open_to_read};

/// Bytes that are looked at to find out what a file is.
const BEGINNING: u64 = 1 << 16;

/// Bytes read at once.
const BUFFER: usize = 1 << 20;

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A JSON object a line.
    Lines,
    /// One JSON array of objects.
    Array,
    /// Values between these.
    Csv(u8),
    Parquet,
    Arrow,
    /// Plain text: all of it is one row.
    Document,
}

/// An open file, unpacked.
pub(super) struct Input {
    pub(super) path: PathBuf,
    pub(super) reader: Box<dyn BufRead>,
    /// What it is packed with.
    packing: Option<&'static str>,
}

impl Input {
    /// What an error of the reader means: of the system, or of a packed file that is damaged.
    pub(super) fn error(&self, error: &io::Error) -> DataError {
        error_of(&self.path, self.packing, error)
    }
}

fn error_of(path: &Path, packing: Option<&'static str>, error: &io::Error) -> DataError {
    let path = path.to_path_buf();
    match packing {
        Some(packing) if error.raw_os_error().is_none() => {
            let cut_off = if error.kind() == io::ErrorKind::UnexpectedEof { "it ends too early: " } else { "" };
            DataError::Unreadable { path, as_what: packing, message: format!("{cut_off}{error}") }
        }
        _ => {
            let source = error
                .raw_os_error()
                .map_or_else(|| io::Error::new(error.kind(), error.to_string()), io::Error::from_raw_os_error);
            DataError::Read { path, source }
        }
    }
}

/// Opens a file; a mark of the byte order at its beginning is skipped.
pub(super) fn open(path: &Path) -> Result<(Kind, Input), DataError> {
    let file = open_to_read(path, FileKind::Data)?;
    let (beginning, reader) = peek(BufReader::with_capacity(BUFFER, file), 4).map_err(DataError::read(path))?;
    let extension = extension(path);
    let (packing, reader): (_, Box<dyn BufRead>) = match (&beginning[..], extension.as_str()) {
        ([0x1f, 0x8b, ..], _) | (_, "gz") => {
            (Some("gzip"), Box::new(BufReader::with_capacity(BUFFER, MultiGzDecoder::new(reader))))
        }
        ([0x28, 0xb5, 0x2f, 0xfd] | [0x50..=0x5f, 0x2a, 0x4d, 0x18], _) | (_, "zst") => {
            let decoder = zstd::Decoder::with_buffer(reader).map_err(|error| error_of(path, Some("zstd"), &error))?;
            (Some("zstd"), Box::new(BufReader::with_capacity(BUFFER, decoder)))
        }
        _ => (None, Box::new(reader)),
    };
    let (mut beginning, mut reader) = peek(reader, BEGINNING).map_err(|error| error_of(path, packing, &error))?;
    if beginning.starts_with(b"\xef\xbb\xbf") {
        beginning.drain(..3);
        reader.consume(3);
    }
    let inner = path.with_extension("");
    let kind = kind(&beginning, if packing.is_some() { &inner } else { path });
    if packing.is_some() && matches!(kind, Kind::Parquet | Kind::Arrow) {
        let message = format!("it holds {kind:?} data, which packs itself: unpack it").to_owned();
        return Err(DataError::Unreadable { path: path.to_path_buf(), as_what: packing.unwrap_or_default(), message });
    }
    Ok((kind, Input { path: path.to_path_buf(), reader: Box::new(reader), packing }))
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
        ("csv", _) => Kind::Csv(b','),
        ("tsv", _) => Kind::Csv(b'\t'),
        ("txt" | "md", _) => Kind::Document,
        (_, Some(b'[')) => Kind::Array,
        _ => Kind::Lines,
    }
}

/// What a folder's file is, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileRole {
    /// A file of rows.
    Rows,
    /// A plain text.
    Document,
}

impl FileRole {
    /// `None` of a file that is not read.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let extension = match extension(path).as_str() {
            "gz" | "zst" => extension(&path.with_extension("")),
            other => other.to_owned(),
        };
        match extension.as_str() {
            "txt" | "md" => Some(Self::Document),
            "jsonl" | "ndjson" | "json" | "csv" | "tsv" | "parquet" | "arrow" | "feather" | "ipc" => Some(Self::Rows),
            _ => None,
        }
    }
}
