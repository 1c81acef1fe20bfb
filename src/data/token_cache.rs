//! The tokens of data files, kept beside them, so that the second start does not tokenise them again.
//!
//! A text file of 500 long documents takes minutes to tokenise. What comes of it lies in an Arrow file, which is mapped: what a data set
//! takes in memory does not depend on its size.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use arrow::buffer::Buffer;
use serde::{Deserialize, Serialize};

use super::chat::ChatNotes;
use super::token_file::TokenFile;
use crate::files::{self, FileKind, Stamp};
use crate::native::{FileMap, arrow_buffer};
use crate::units::{Fault, abridged};

/// Raised whenever files or prompts change their meaning.
const VERSION: u32 = 10;

/// Files of tokens that are kept of the same data, with other tokenizers or settings; the oldest is forgotten first.
const MAX_FILES: usize = 4;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct TokenRecord {
    version: u32,
    sizes: Vec<u64>,
    /// A hash of the content of each data file, which whoever makes tokens sets at the end.
    pub(super) hashes: Vec<String>,
    /// Everything else that decides ids and targets: tokenizer, format, head.
    settings: String,
    pub(super) read: usize,
    /// Rows that are none, and were left out.
    pub(super) bad: usize,
    pub(super) notes: ChatNotes,
}

/// Whoever makes tokens hashes at the end: a file that is none of data is refused at its first row, and the system has at hand what was read.
pub(super) fn hashes_of(paths: &[PathBuf]) -> Result<Vec<String>, Fault> {
    paths.iter().map(|path| files::hash_large_file(path)).collect()
}

pub(super) struct Tokens {
    pub(super) file: TokenFile,
    pub(super) record: TokenRecord,
    /// What the file is mapped by; `None` where it is in memory.
    pub(super) map: Option<Arc<FileMap>>,
    pub(super) is_cached: bool,
    pub(super) problem: Option<String>,
}

/// The tokens of data files that an earlier start has left in one of some places, or those that `write` makes; `settings` is what decides them
/// beside the files. `write` completes the record that it is given, and is called again where a place is full. What is wrong with the data is a
/// fault inside of its error.
pub(super) fn open(
    places: &[PathBuf],
    paths: &[PathBuf],
    settings: String,
    mut write: impl FnMut(&mut dyn Write, TokenRecord) -> io::Result<()>,
) -> Result<Tokens, Fault> {
    let before: Vec<_> = paths.iter().map(|path| Stamp::of(path)).collect();
    let sizes = before.iter().map(|stamp| stamp.as_ref().map_or(0, |stamp| stamp.size)).collect();
    let (hashes, notes) = (Vec::new(), ChatNotes::default());
    let record = TokenRecord { version: VERSION, sizes, hashes, settings, read: 0, bad: 0, notes };
    let found: Vec<Tokens> = places.iter().filter_map(|place| stored(place, &record).ok()).collect();
    if !found.is_empty() {
        // Only what there are tokens of is hashed before it is read.
        let hashes = hashes_of(paths)?;
        if let Some(found) = found.into_iter().find(|found| found.record.hashes == hashes) {
            return Ok(found);
        }
    }
    let mut write = |out: &mut dyn Write| {
        write(out, record.clone())?;
        let changed = paths.iter().zip(&before).find(|(path, before)| Stamp::of(path) != **before);
        changed.map_or(Ok(()), |(path, _)| {
            let message = format!("`{}` has changed while it was read", abridged(path.display()));
            Err(Fault::data(message, "start again when nobody writes to it").into())
        })
    };
    let mut problem = None;
    for place in places {
        match make(place, &mut write) {
            Ok(()) => {
                forget_old(place);
                match stored(place, &record) {
                    Ok(tokens) => return Ok(Tokens { is_cached: false, ..tokens }),
                    Err(message) => problem = Some(message),
                }
            }
            Err(error) => problem = Some(of_place(error)?.to_string()),
        }
    }
    let tokens = in_temporary_file(&mut write)?;
    Ok(Tokens { problem, ..tokens.map_or_else(|| in_memory(&mut write), Ok)? })
}

/// The places that tokens may lie in, the best first: beside the first data file, then in the user's cache folder.
pub(super) fn places(paths: &[PathBuf], settings: &str) -> Vec<PathBuf> {
    let Some(first) = paths.first() else { return Vec::new() };
    let name = format!("{}.arrow", &files::hash_bytes(settings.as_bytes())[..16]);
    let mut beside = first.as_os_str().to_owned();
    beside.push(".tokens");
    // Of files of the same name in other folders.
    let paths = paths.iter().map(|path| files::absolute(path));
    let own = files::hash_parts(paths.map(|path| path.into_os_string().into_encoded_bytes()));
    let cache = files::cache_folder().map(|cache| cache.join("tokens").join(&own[..16]));
    std::iter::once(PathBuf::from(beside)).chain(cache).map(|folder| folder.join(&name)).collect()
}

fn make(place: &Path, write: &mut dyn FnMut(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let folder = place.parent().unwrap_or(place);
    // A folder beside the data is made if its own parent is there and can be written to; one in the user's cache with all above it.
    let is_new = !folder.exists();
    fs::create_dir_all(folder)?;
    let mut is_of_data = false;
    let written = files::write_atomic_with(place, |out| {
        write(out).inspect_err(|error| is_of_data = matches!(error.get_ref(), Some(inner) if inner.is::<Fault>()))
    });
    if written.is_err() && is_new {
        // An empty folder would only be in the way.
        let _ = fs::remove_dir(folder);
    }
    written.map_err(|error| if is_of_data { error.into() } else { io::Error::other(in_full(&error)) })
}

/// An error of the place that was written to; what is wrong with the data is passed on.
fn of_place(error: io::Error) -> Result<io::Error, Fault> {
    error.downcast().map_or_else(Ok, Err)
}

fn in_full(error: &Fault) -> String {
    let cause = std::error::Error::source(error).map(|cause| format!(": {cause}"));
    format!("{error}{}", cause.unwrap_or_default())
}

/// What lies in a place, if it was made of files of the same sizes with the same settings. What is damaged or of another version is none.
fn stored(place: &Path, expected: &TokenRecord) -> Result<Tokens, String> {
    let tokens = read_mapped(&files::map_file(place, FileKind::Data).map_err(|error| in_full(&error))?)?;
    let TokenRecord { version, sizes, settings, read, .. } = &tokens.record;
    if (*version, settings, sizes) != (VERSION, &expected.settings, &expected.sizes) {
        return Err(format!("`{}` was made of something else", place.display()));
    }
    if *read != tokens.file.len {
        return Err(format!("`{}` lacks samples", place.display()));
    }
    Ok(Tokens { is_cached: true, ..tokens })
}

/// Removes the oldest files of tokens in the folder of `place`, and what writes have left there that did not end.
fn forget_old(place: &Path) {
    let Some(folder) = place.parent() else { return };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let is_arrow = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "arrow");
    let mut kept: Vec<(SystemTime, PathBuf)> = entries
        .map(|entry| entry.path())
        .filter(|path| is_arrow(path) && path != place)
        .filter_map(|path| Some((path.metadata().ok()?.modified().ok()?, path)))
        .collect();
    kept.sort();
    let surplus = (kept.len() + 1).saturating_sub(MAX_FILES);
    for (_, path) in &kept[..surplus] {
        // What cannot be removed takes room, and does no other harm.
        let _ = fs::remove_file(path);
    }
}

/// Tokens that nobody finds again; `None` where there is no room for them either.
fn in_temporary_file(write: &mut dyn FnMut(&mut dyn Write) -> io::Result<()>) -> Result<Option<Tokens>, Fault> {
    let Ok(file) = files::unnamed_file(&std::env::temp_dir()) else { return Ok(None) };
    let mut out = BufWriter::with_capacity(1 << 20, file);
    match write(&mut out).and_then(|()| out.flush()) {
        Err(error) => of_place(error).map(|_| None),
        // The file stays as long as it is mapped.
        Ok(()) => Ok(FileMap::new(out.get_ref().as_file()).ok().and_then(|map| read_mapped(&Arc::new(map)).ok())),
    }
}

fn in_memory(write: &mut dyn FnMut(&mut dyn Write) -> io::Result<()>) -> Result<Tokens, Fault> {
    let mut bytes = Vec::new();
    let failed = |message: String| {
        let hint = "free some disk space beside the data file or for temporary files, or use a machine with more memory";
        Fault::data(format!("the tokens of the data cannot be kept: {}", abridged(message)), hint)
    };
    match write(&mut bytes) {
        Ok(()) => read(&Buffer::from(bytes)).map_err(|_| failed("what was written is not what is read".into())),
        Err(error) => Err(failed(of_place(error)?.to_string())),
    }
}

fn read_mapped(map: &Arc<FileMap>) -> Result<Tokens, String> {
    Ok(Tokens { map: Some(map.clone()), ..read(&arrow_buffer(map))? })
}

fn read(bytes: &Buffer) -> Result<Tokens, String> {
    let (file, record) = TokenFile::read(bytes)?;
    Ok(Tokens { file, record, map: None, is_cached: false, problem: None })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::Duration;

    use super::*;
    use crate::data::encoded_sample::{Aim, EncodedSample};
    use crate::data::faults;
    use crate::data::sample_place::LineOrRecord;
    use crate::data::token_file::{About, TokenWriter};

    /// Tokens of files whose bytes are the tokens; counts how often they are made.
    fn open_counted(places: &[PathBuf], paths: &[PathBuf], settings: &str, made: &mut usize) -> Result<Tokens, Fault> {
        open(places, paths, settings.to_owned(), |out, mut record| {
            *made += 1;
            let mut writer = TokenWriter::new(out)?;
            for (file, path) in paths.iter().enumerate() {
                let ids: Vec<u32> = fs::read(path)?.into_iter().map(u32::from).collect();
                let aim = Aim::Tokens(vec![true; ids.len()]);
                let about =
                    About { file, at: LineOrRecord::Line(1), references: None, groups: None, border: None, follow_up: None };
                writer.push(&EncodedSample { ids, prompt: 0, aim, initial: None, border: None }, &about)?;
                record.read += 1;
            }
            record.hashes = hashes_of(paths)?;
            writer.finish(&record)
        })
    }

    #[test]
    fn remembers_by_content_and_settings_and_believes_only_what_is_sound() {
        let dir = tempfile::tempdir().unwrap();
        let data = vec![dir.path().join("a.txt")];
        fs::write(&data[0], "some").unwrap();
        let beside = |settings: &str| places(&data, settings).remove(0);
        assert_eq!(beside("s").parent().unwrap(), dir.path().join("a.txt.tokens"));
        let open = |settings: &str| {
            let mut made = 0;
            let tokens = open_counted(&[beside(settings)], &data, settings, &mut made).unwrap();
            assert_eq!((tokens.is_cached, tokens.problem), (made == 0, None));
            (tokens.file.ids(0).to_vec(), made)
        };
        let some = b"some".map(u32::from).to_vec();
        assert_eq!([open("s"), open("s"), open("t"), open("s")], [1, 0, 1, 0].map(|made| (some.clone(), made)));
        // Another content of the same length.
        fs::write(&data[0], "more").unwrap();
        assert_eq!(open("s"), (b"more".map(u32::from).to_vec(), 1));
        let whole = fs::read(beside("s")).unwrap();
        for damaged in [&whole[..whole.len() - 1], b"{}", b""] {
            fs::write(beside("s"), damaged).unwrap();
            assert_eq!((open("s").1, open("s").1), (1, 0));
        }
        // One of other settings under this name is none.
        fs::copy(beside("t"), beside("u")).unwrap();
        assert_eq!(open("u").1, 1);
        for number in 0..9 {
            open(&number.to_string());
        }
        assert_eq!(fs::read_dir(dir.path().join("a.txt.tokens")).unwrap().count(), MAX_FILES);
        assert_eq!((open("8").1, open("s").1), (0, 1));
    }

    #[test]
    fn a_file_that_was_written_is_seen_whatever_its_time_of_writing_says() {
        let dir = tempfile::tempdir().unwrap();
        let data = vec![dir.path().join("a.txt")];
        let place = [dir.path().join("tokens.arrow")];
        let old = SystemTime::now() - Duration::from_secs(100);
        let write = |text: &str| {
            fs::write(&data[0], text).unwrap();
            File::options().write(true).open(&data[0]).unwrap().set_modified(old).unwrap();
        };
        let mut made = 0;
        write("some");
        open_counted(&place, &data, "s", &mut made).unwrap();
        write("more");
        assert_eq!(open_counted(&place, &data, "s", &mut made).unwrap().file.ids(0)[0], u32::from(b'm'));
        // Only the times have changed: the hash tells.
        write("more");
        open_counted(&place, &data, "s", &mut made).unwrap();
        assert_eq!(made, 2);
    }

    #[test]
    fn what_is_refused_at_once_or_has_another_size_is_not_hashed() {
        let dir = tempfile::tempdir().unwrap();
        let (data, place) = (vec![dir.path().join("a.txt")], [dir.path().join("tokens.arrow")]);
        fs::write(&data[0], "some").unwrap();
        open_counted(&place, &data, "s", &mut 0).unwrap();
        // A terabyte of nothing would take minutes.
        File::options().write(true).open(&data[0]).unwrap().set_len(1 << 40).unwrap();
        let refused = open(&place, &data, "s".into(), |_, _| Err(faults::empty(Path::new("x")).into()));
        assert!(refused.is_err_and(|error| error.to_string().contains("holds no samples")));
    }

    #[test]
    fn where_nothing_can_be_kept_the_tokens_live_as_long_as_the_run() {
        let dir = tempfile::tempdir().unwrap();
        let data = vec![dir.path().join("a.txt")];
        fs::write(&data[0], "some").unwrap();
        // A file stands where the folder would.
        let places = [dir.path().join("a.txt/x.arrow"), dir.path().join("kvtune/tokens/x.arrow")];
        let mut made = 0;
        let found = open_counted(&places, &data, "s", &mut made).unwrap();
        assert!(places[1].exists() && found.map.is_some());
        let found = open_counted(&places[..1], &data, "s", &mut made).unwrap();
        assert!(found.problem.is_some_and(|problem| !problem.is_empty()) && found.file.len == 1);
        let refused = open(&[], &data, "s".into(), |_, _| Err(faults::empty(Path::new("x")).into()));
        assert!(refused.is_err_and(|error| error.to_string().contains("holds no samples")));
        let changing = open(&[], &data, "s".into(), |out, record| {
            fs::write(&data[0], "longer").unwrap();
            TokenWriter::new(out)?.finish(&record)
        });
        assert!(changing.is_err_and(|error| error.to_string().contains("has changed while")));
    }
}
