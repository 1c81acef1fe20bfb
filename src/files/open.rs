//! The one door through which files are read. What is opened is a regular file of a size that its kind may have, whoever put it there:
//! nobody is waited for at the other end of a pipe, and no device is read for ever.

use std::fs::{File, FileType, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::OFlags;

use super::io_fault;
use crate::native::FileMap;
use crate::units::{Bytes, Fault, FaultKind, abridged};

/// What a file is to be read as; decides how large it may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    Recipe,
    /// Settings of a model, an adapter, a tokenizer or a data set, in JSON.
    Settings,
    /// Which shard holds which tensor.
    Index,
    Tokenizer,
    Template,
    /// A text, a conversation or functions to be answered.
    Prompt,
    /// What a program leaves for itself in a line or a few: `latest`, a lock, a remembered hash, a key.
    Note,
    /// What a run leaves for itself: state, manifest, split, summary.
    Record,
    /// A line a step, an answer or a score.
    Lines,
    Texts,
    /// Tensors; their header is limited where it is read.
    Tensors,
    /// Rows of data, read in parts; the file of their tokens; anything whose bytes are hashed or copied.
    Data,
}

impl FileKind {
    /// What messages call it, and the bytes that it may have; `None` where it is never in memory as a whole.
    fn facts(self) -> (&'static str, Option<u64>) {
        match self {
            Self::Recipe => ("a recipe", Some(4 << 20)),
            Self::Settings => ("a file of settings", Some(16 << 20)),
            Self::Index => ("an index of shards", Some(256 << 20)),
            Self::Tokenizer => ("a tokenizer", Some(256 << 20)),
            Self::Template => ("a chat template", Some(4 << 20)),
            Self::Prompt => ("a prompt", Some(256 << 20)),
            Self::Note => ("a file of one line", Some(64 << 10)),
            Self::Record => ("a record of a run", Some(256 << 20)),
            Self::Lines => ("a file of metrics, scores or answers", Some(1 << 30)),
            Self::Texts => ("a text for a tokenizer to be trained on", Some(1 << 30)),
            Self::Tensors => ("a file of tensors", None),
            Self::Data => ("a file of data", None),
        }
    }

    /// Values that it may hold as JSON: each takes some ten times its bytes in memory.
    pub(super) fn max_values(self) -> usize {
        match self {
            Self::Tokenizer | Self::Record => 4 << 20,
            // Of tensors the header's: some eight for each.
            _ => 1 << 20,
        }
    }
}

/// Opens a file to read it. Fails where it is no regular file behind its links, which might be waited for, or larger than its kind may be.
pub fn open_to_read(path: &Path, kind: FileKind) -> Result<File, Fault> {
    let look = |found: io::Result<Metadata>| check(path, kind, &found.map_err(io_fault("read", path))?);
    // Before it is opened, as opening alone does something to some devices; and again, as it may be another by then.
    look(std::fs::metadata(path))?;
    let open = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path);
    let file = open.map_err(io_fault("read", path))?;
    look(file.metadata())?;
    Ok(file)
}

fn check(path: &Path, kind: FileKind, found: &Metadata) -> Result<(), Fault> {
    if !found.is_file() {
        let (found, expected) = (special(found.file_type()), kind.facts().0);
        let message = format!("`{}` is {found}: expected {expected}", abridged(path.display()));
        let hint = "name a regular file, or write what comes from elsewhere into one first";
        return Err(Fault::data(message, hint).of_kind(FaultKind::NotRegular));
    }
    match kind.facts().1 {
        Some(limit) if found.len() > limit => Err(too_large(path, kind, limit)),
        _ => Ok(()),
    }
}

fn too_large(path: &Path, kind: FileKind, limit: u64) -> Fault {
    let message = format!("`{}` is too large: {} may have {} at most", abridged(path.display()), kind.facts().0, Bytes(limit));
    Fault::data(message, "check whether it is the file that you mean, and fetch or write it again").of_kind(FaultKind::Damaged)
}

pub(super) fn special(found: FileType) -> &'static str {
    match found {
        found if found.is_dir() => "a directory",
        found if found.is_fifo() => "a pipe",
        found if found.is_socket() => "a socket",
        found if found.is_char_device() || found.is_block_device() => "a device",
        _ => "something else",
    }
}

/// The bytes of a file, of which there are no more than its kind may have even if it grows.
pub fn read_bytes(path: &Path, kind: FileKind) -> Result<Vec<u8>, Fault> {
    let file = open_to_read(path, kind)?;
    let limit = kind.facts().1.unwrap_or(u64::MAX);
    let mut bytes = Vec::new();
    let room = file.metadata().map_or(0, |found| found.len()).min(limit);
    bytes.try_reserve_exact(room as usize).map_err(|error| io_fault("read", path)(error.into()))?;
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(io_fault("read", path))?;
    if bytes.len() as u64 > limit { Err(too_large(path, kind, limit)) } else { Ok(bytes) }
}

/// A file as memory, for readers that take bytes.
pub fn map_file(path: &Path, kind: FileKind) -> Result<Arc<FileMap>, Fault> {
    FileMap::new(&open_to_read(path, kind)?).map(Arc::new).map_err(io_fault("map", path))
}

/// Gives the memory of values that lie in a mapped file back to the system; who looks again reads the file again. Other values are left alone.
pub fn release_mapped<T>(map: &FileMap, values: &[T]) {
    let first = (values.as_ptr() as usize).wrapping_sub(map.bytes().as_ptr() as usize);
    let length = size_of_val(values);
    if first.checked_add(length).is_some_and(|end| end <= map.bytes().len()) {
        map.release(first..first + length);
    }
}

/// Whether something stands there, were it a link to nothing: who reads it is told what is wrong with it.
pub fn is_there(path: &Path) -> bool {
    !matches!(std::fs::symlink_metadata(path), Err(error) if error.kind() == io::ErrorKind::NotFound)
}

/// Reads a file as [`read_bytes`] does; it need not be there.
pub fn read_if_there(path: &Path, kind: FileKind) -> Result<Option<Vec<u8>>, Fault> {
    if is_there(path) { read_bytes(path, kind).map(Some) } else { Ok(None) }
}

pub fn read_text(path: &Path, kind: FileKind) -> Result<String, Fault> {
    let not_text = |error: std::string::FromUtf8Error| {
        let at = error.utf8_error().valid_up_to();
        let message = format!("`{}` is not UTF-8: byte {} is 0x{:02x}", abridged(path.display()), at + 1, error.as_bytes()[at]);
        Fault::data(message, "save it as text in UTF-8").of_kind(FaultKind::Damaged)
    };
    String::from_utf8(read_bytes(path, kind)?).map_err(not_text)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn what_is_no_regular_file_is_refused_by_what_it_is_and_nobody_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        symlink("/dev/zero", at("zero")).unwrap();
        symlink("pipe", at("link")).unwrap();
        for (name, what) in
            [("pipe", "a pipe"), ("link", "a pipe"), ("socket", "a socket"), ("zero", "a device"), (".", "a directory")]
        {
            let error = read_bytes(&at(name), FileKind::Settings).unwrap_err();
            let words = format!("is {what}: expected a file of settings");
            assert!(error.to_string().ends_with(&words) && error.hint().is_some(), "{error}");
        }
    }

    #[test]
    fn each_way_not_to_be_there_has_a_hint() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        symlink("round", at("round")).unwrap();
        symlink("nothing", at("dangling")).unwrap();
        std::fs::write(at("file"), "").unwrap();
        for (name, words) in [
            ("round", "link"),
            ("dangling", "check the path"),
            (&"n".repeat(256), "255 bytes"),
            (&"n/".repeat(2500), "255 bytes"),
            ("file/inner", "a file or a directory"),
            ("a\0b", "check the path"),
        ] {
            let error = read_if_there(&at(name), FileKind::Data).map(|found| found.expect("it is there")).unwrap_err();
            assert!(error.hint().is_some_and(|hint| hint.contains(words)), "{name}: {error}: {:?}", error.hint());
        }
        assert!(read_if_there(&at("none"), FileKind::Data).unwrap().is_none());
    }

    #[test]
    fn a_file_is_as_large_as_its_kind_allows_at_most() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let file = File::create(&path).unwrap();
        file.set_len(64 << 10).unwrap();
        assert_eq!(read_bytes(&path, FileKind::Note).unwrap().len(), 64 << 10);
        // A hole takes no room on disk.
        file.set_len(5 << 30).unwrap();
        for (kind, words) in [(FileKind::Note, "64.0 KiB"), (FileKind::Recipe, "4.0 MiB"), (FileKind::Lines, "1.0 GiB")] {
            let error = read_bytes(&path, kind).unwrap_err();
            assert!(error.to_string().ends_with(&format!("{} may have {words} at most", kind.facts().0)), "{error}");
        }
        assert!(open_to_read(&path, FileKind::Data).is_ok());
        std::fs::write(&path, b"ab\xffc").unwrap();
        let error = read_text(&path, FileKind::Recipe).unwrap_err().to_string();
        assert!(error.ends_with("is not UTF-8: byte 3 is 0xff"), "{error}");
    }

    #[test]
    fn what_was_given_back_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        std::fs::write(&path, vec![7; 20_000]).unwrap();
        let map = map_file(&path, FileKind::Data).unwrap();
        release_mapped(&map, &map.bytes()[5_000..19_000]);
        release_mapped(&map, &[1, 2, 3]);
        assert!(map.bytes().iter().all(|&byte| byte == 7) && map.bytes().len() == 20_000);
        assert!(map_file(&dir.path().join("none"), FileKind::Data).unwrap_err().io().is_some());
        std::fs::write(&path, "").unwrap();
        assert!(map_file(&path, FileKind::Data).unwrap().bytes().is_empty());
    }
}
