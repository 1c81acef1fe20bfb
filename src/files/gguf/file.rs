//! A GGUF file, opened as memory: keys and tensors by their names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::dtype::GgufDtype;
use super::header::{ARCHITECTURE, GgufRecord, GgufStored, GgufValue, Reader, wrong};
use crate::files::tensors::TensorView;
use crate::files::{FileKind, Stamp, io_fault, is_there, map_file};
use crate::native::{FileMap, locked};
use crate::units::{Fault, abridged, listed, quoted};

/// A model in one file, or in several parts of which the first has all keys. Cheap to clone.
#[derive(Clone, Debug)]
pub struct GgufFile {
    parts: Arc<Vec<GgufPart>>,
    tensors: Arc<BTreeMap<String, GgufRecord>>,
}

/// The file that was opened last, as configuration, tokenizer, template and weights are asked for one after the other.
static LAST: Mutex<Option<(Vec<Option<Stamp>>, GgufFile)>> = Mutex::new(None);

#[derive(Debug)]
struct GgufPart {
    path: PathBuf,
    map: Arc<FileMap>,
    keys: GgufStored,
}

impl GgufFile {
    /// The file of a model at `path`, or of a folder, which must not have several; `None` where the model is in Hugging Face's format.
    pub fn of_model(path: &Path) -> Result<Option<Self>, Fault> {
        let is_gguf = |path: &Path| path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"));
        if !path.is_dir() {
            return if is_gguf(path) && is_there(path) { Self::open(path).map(Some) } else { Ok(None) };
        }
        if is_there(&path.join("config.json")) {
            return Ok(None);
        }
        let entries = std::fs::read_dir(path).map_err(io_fault("read", path))?;
        let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(|path| is_gguf(path)).collect();
        found.sort_unstable();
        match &found[..] {
            [] => Ok(None),
            [only] => Self::open(only).map(Some),
            [first, ..] => {
                let file = Self::open(first)?;
                if found.iter().all(|path| file.paths().any(|part| part == path)) {
                    return Ok(Some(file));
                }
                let names: Vec<_> = found.iter().filter_map(|path| Some(path.file_name()?.to_string_lossy())).collect();
                let message = format!("`{}` holds several GGUF files: {}", abridged(path.display()), listed(&names));
                Err(Fault::data(message, "name one of them: `model.path = \"FOLDER/NAME.gguf\"`"))
            }
        }
    }

    /// Opens and checks a file, and the others where it is a part of several. The one that was opened last is not read again.
    pub fn open(path: &Path) -> Result<Self, Fault> {
        let mut last = locked(&LAST);
        if let Some((stamps, file)) = last.as_ref().filter(|(_, file)| file.path() == path)
            && *stamps == file.stamps()
        {
            return Ok(file.clone());
        }
        let file = Self::read_header(path)?;
        let stamps = file.stamps();
        let is_old_enough = stamps.iter().all(|stamp| stamp.as_ref().is_some_and(Stamp::is_old_enough));
        *last = is_old_enough.then(|| (stamps, file.clone()));
        Ok(file)
    }

    fn stamps(&self) -> Vec<Option<Stamp>> {
        self.paths().map(Stamp::of).collect()
    }

    fn read_header(path: &Path) -> Result<Self, Fault> {
        let (first, records) = GgufPart::read(path, 0)?;
        let Some(count) = first.count("split.count")?.filter(|&count| count > 1) else {
            return Self::of_parts(vec![first], vec![records]);
        };
        let read = first.siblings(count)?.into_iter().enumerate().map(|(at, path)| GgufPart::read(&path, at));
        let (parts, records): (Vec<_>, Vec<_>) = read.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
        for (at, part) in parts.iter().enumerate() {
            let numbers = (part.count("split.no")?, part.count("split.count")?);
            if numbers != (Some(at), Some(count)) {
                let found = numbers.0.map_or_else(|| "no part".to_owned(), |no| format!("part {no}"));
                return Err(part.wrong(&format!("expected part {at} of {count}, found {found} (`split.no`, `split.count`)")));
            }
        }
        let (first, found) = (&parts[0], records.iter().map(Vec::len).sum::<usize>());
        if let Some(expected) = first.count("split.tensors.count")?.filter(|&expected| expected != found) {
            return Err(first.wrong(&format!("`split.tensors.count` is {expected}, its parts hold {found}")));
        }
        Self::of_parts(parts, records)
    }

    fn of_parts(parts: Vec<GgufPart>, records: Vec<Vec<GgufRecord>>) -> Result<Self, Fault> {
        let mut tensors = BTreeMap::new();
        for (part, records) in parts.iter().zip(records) {
            for record in records {
                if let Some(twice) = tensors.insert(record.name.clone(), record) {
                    return Err(part.wrong(&format!("it has two tensors `{}`", quoted(&twice.name))));
                }
            }
        }
        Ok(Self { parts: Arc::new(parts), tensors: Arc::new(tensors) })
    }

    /// The file that has the keys.
    pub fn path(&self) -> &Path {
        &self.parts[0].path
    }

    /// The keys that are kept, with their values, as they lie in the file.
    pub(super) fn stored_keys(&self, is_kept: impl Fn(&str) -> bool) -> Vec<&[u8]> {
        let GgufPart { map, keys, .. } = &self.parts[0];
        let mut places: Vec<_> = keys.iter().filter(|(key, _)| is_kept(key)).map(|(_, (_, place))| place.clone()).collect();
        places.sort_by_key(|place| place.start);
        places.into_iter().map(|place| &map.bytes()[place]).collect()
    }

    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.parts.iter().map(|part| part.path.as_path())
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub fn get(&self, name: &str) -> Option<TensorView<'_, GgufDtype>> {
        let GgufRecord { part, dtype, shape, bytes, .. } = self.tensors.get(name)?;
        let map = &self.parts[*part].map;
        Some(TensorView { dtype: *dtype, shape, offset: bytes.start, bytes: &map.bytes()[bytes.clone()], map })
    }

    /// Lets go of the memory into which a tensor was read; it is read again by who looks again.
    pub fn release(&self, name: &str) {
        if let Some(record) = self.tensors.get(name) {
            self.parts[record.part].map.release(record.bytes.clone());
        }
    }

    /// What is wrong with the content, in a file that is sound.
    pub fn wrong(&self, reason: &str) -> Fault {
        self.parts[0].wrong(reason)
    }

    /// A key's name in full: one that begins with a dot is of the file's architecture, as `llama.block_count`.
    pub fn named(&self, key: &str) -> String {
        self.parts[0].named(key)
    }

    pub fn count(&self, key: &str) -> Result<Option<usize>, Fault> {
        self.parts[0].count(key)
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>, Fault> {
        self.parts[0].value(key, "a number", |found| match found {
            GgufValue::Float(value) => Some(*value).filter(|value| value.is_finite()),
            GgufValue::Integer(value) => Some(*value as f64),
            _ => None,
        })
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, Fault> {
        self.parts[0].value(key, "true or false", |found| if let GgufValue::Bool(value) = found { Some(*value) } else { None })
    }

    pub fn text(&self, key: &str) -> Result<Option<&str>, Fault> {
        self.parts[0].value(key, "a text", |found| if let GgufValue::Text(text) = found { Some(&text[..]) } else { None })
    }

    pub fn texts(&self, key: &str) -> Result<&[String], Fault> {
        let texts = self.parts[0].value(key, "a list of texts", |found| match found {
            GgufValue::Texts(texts) => Some(&texts[..]),
            _ => None,
        })?;
        texts.ok_or_else(|| self.missing(key))
    }

    /// The numbers of a list, where the key is one.
    pub fn integers(&self, key: &str) -> Option<&[i64]> {
        if let Some(GgufValue::Integers(list)) = self.parts[0].key(key) { Some(list) } else { None }
    }

    /// The numbers of a list of floats, where the key is one.
    pub fn list_of_floats(&self, key: &str) -> Option<&[f32]> {
        if let Some(GgufValue::Floats(list)) = self.parts[0].key(key) { Some(list) } else { None }
    }

    /// The tokens that end a text: a sequence, and a turn.
    pub fn end_ids(&self) -> Result<Vec<u32>, Fault> {
        let mut ends = Vec::new();
        for name in ["eos", "eot"] {
            let id = self.count(&format!("tokenizer.ggml.{name}_token_id"))?.and_then(|id| u32::try_from(id).ok());
            ends.extend(id.filter(|id| !ends.contains(id)));
        }
        Ok(ends)
    }

    /// The numbers of a small tensor of f32, which must be so many finite ones; `None` where it is not there.
    pub fn floats(&self, tensor: &str, count: usize) -> Result<Option<Vec<f32>>, Fault> {
        let Some(found) = self.get(tensor) else { return Ok(None) };
        let numbers: Vec<f32> = found.bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let fits = found.dtype.name == "F32" && found.shape == [count] && numbers.iter().all(|x| x.is_finite() && *x > 0.0);
        if fits {
            Ok(Some(numbers))
        } else {
            Err(self.wrong(&format!("tensor `{tensor}` is not {count} positive numbers in F32")))
        }
    }

    pub fn missing(&self, key: &str) -> Fault {
        self.wrong(&format!("`{}` is missing", self.named(key)))
    }

    pub fn required(&self, key: &str) -> Result<usize, Fault> {
        self.count(key)?.ok_or_else(|| self.missing(key))
    }

    pub fn required_text(&self, key: &str) -> Result<&str, Fault> {
        self.text(key)?.ok_or_else(|| self.missing(key))
    }
}

impl GgufPart {
    /// Maps the part of this number and reads its header; the tensors' bytes are counted from the start of the file.
    fn read(path: &Path, number: usize) -> Result<(Self, Vec<GgufRecord>), Fault> {
        let map = map_file(path, FileKind::Tensors)?;
        if map.bytes().is_empty() {
            return Err(wrong(path, "it is empty"));
        }
        let (keys, records) = Reader { path, bytes: map.bytes(), at: 0 }.header(number)?;
        Ok((Self { path: path.to_path_buf(), map, keys }, records))
    }

    fn wrong(&self, reason: &str) -> Fault {
        wrong(&self.path, reason)
    }

    fn named(&self, key: &str) -> String {
        match self.keys.get(ARCHITECTURE) {
            Some((GgufValue::Text(architecture), _)) if key.starts_with('.') => format!("{architecture}{key}"),
            _ => key.to_owned(),
        }
    }

    fn key(&self, key: &str) -> Option<&GgufValue> {
        self.keys.get(&self.named(key)).map(|(value, _)| value)
    }

    /// What `read` makes of a key, if it is there.
    fn value<'a, T>(&'a self, key: &str, what: &str, read: impl Fn(&'a GgufValue) -> Option<T>) -> Result<Option<T>, Fault> {
        let Some(found) = self.key(key) else { return Ok(None) };
        let other = || self.wrong(&format!("`{}` is {}, expected {what}", self.named(key), found.shown()));
        read(found).map(Some).ok_or_else(other)
    }

    fn count(&self, key: &str) -> Result<Option<usize>, Fault> {
        self.value(key, "a whole number", |found| if let GgufValue::Integer(n) = found { usize::try_from(*n).ok() } else { None })
    }

    /// The paths of all parts, `X-00001-of-0000N.gguf` and so on.
    fn siblings(&self, count: usize) -> Result<Vec<PathBuf>, Fault> {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let suffix = format!("-of-{count:05}.gguf");
        let stem = name.strip_suffix(&suffix).and_then(|rest| rest.rsplit_once('-')).map(|(stem, _)| stem);
        let unnamed = || self.wrong(&format!("it is a part of {count} (`split.count`), expected a name that ends in `{suffix}`"));
        let stem = stem.filter(|_| count <= 99_999).ok_or_else(unnamed)?;
        Ok((1..=count).map(|no| self.path.with_file_name(format!("{stem}-{no:05}{suffix}"))).collect())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use rand::rngs::ChaCha8Rng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quantised").join(name)
    }

    /// The bytes of a file with these keys (already encoded), and tensors of four ones.
    pub(in super::super) fn file(keys: &[(&str, Vec<u8>)], tensors: &[&str]) -> Vec<u8> {
        let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        let counts = [tensors.len(), keys.len()].map(|count| (count as u64).to_le_bytes());
        let mut bytes = [&b"GGUF"[..], &3u32.to_le_bytes(), &counts.concat()].concat();
        bytes.extend(keys.iter().flat_map(|(name, value)| [text(name), value.clone()].concat()));
        for (at, name) in tensors.iter().enumerate() {
            bytes.extend([text(name), 1u32.to_le_bytes().into(), 4u64.to_le_bytes().into(), 0u32.to_le_bytes().into()].concat());
            bytes.extend((32 * at as u64).to_le_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        for _ in tensors {
            bytes.extend([[1f32; 4], [0.0; 4]].as_flattened().iter().flat_map(|number| number.to_le_bytes()));
        }
        bytes
    }

    pub(in super::super) fn number(value: u32) -> Vec<u8> {
        [4u32, value].map(u32::to_le_bytes).concat()
    }

    pub(in super::super) fn opened(bytes: &[u8]) -> Result<GgufFile, Fault> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.gguf");
        std::fs::write(&path, bytes).unwrap();
        GgufFile::open(&path)
    }

    #[test]
    fn no_byte_that_is_changed_or_missing_is_more_than_an_error() {
        let whole = std::fs::read(fixture("model-gguf-llama-q4_0/model.gguf")).unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for _ in 0..600 {
            let mut bytes = whole.clone();
            let at = rng.random_range(0..12_000);
            bytes[at] ^= 1 << rng.random_range(0..8);
            let _ = opened(&bytes).map(|file| super::super::config_of(&file).map(|_| super::super::tokenizer_json(&file)));
        }
        for length in (0..whole.len()).step_by(997) {
            let error = opened(&whole[..length]).unwrap_err();
            assert!(error.hint().is_some(), "{error}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let list = |kind: u32, count: u64| [&9u32.to_le_bytes()[..], &kind.to_le_bytes(), &count.to_le_bytes()].concat();
        for (keys, words) in [
            (vec![("a", number(1)), ("a", number(1))], "the key `a` twice"),
            (vec![("general.alignment", number(24))], "`general.alignment` is 24, expected a power of two"),
            (vec![("a", list(9, 1))], "`a` is a list of lists"),
            (vec![("a", list(4, 1 << 60))], "its number of items of `a` is 1152921504606846976"),
            (vec![("a", [7u32.to_le_bytes().to_vec(), vec![2]].concat())], "`a` is 2, expected 0 or 1"),
            (vec![("a", 99u32.to_le_bytes().into())], "`a` has the unknown type 99"),
            (vec![("split.count", number(2))], "expected a name that ends in `-of-00002.gguf`"),
        ] {
            let error = opened(&file(&keys, &["t"])).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let sound = file(&[], &["t"]);
        assert_eq!(opened(&sound).unwrap().get("t").unwrap().shape, [4]);
        for (at, byte, words) in [(0, b'g', "does not begin with `GGUF`"), (4, 1, "its version is 1"), (7, 3, "big-endian")] {
            let mut bytes = sound.clone();
            if at == 7 {
                bytes[4] = 0;
            }
            bytes[at] = byte;
            let error = opened(&bytes).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn a_model_in_parts_is_one_whichever_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let part = |no: u32| {
            let name = format!("m-{:05}-of-00002.gguf", no + 1);
            let tensor = if no == 0 { b't' } else { b'u' };
            let mut bytes = file(&[("split.no", number(no)), ("split.count", number(2))], &["t"]);
            let at = bytes.windows(9).position(|window| window == b"\x01\0\0\0\0\0\0\0t").unwrap() + 8;
            bytes[at] = tensor;
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let (first, second) = (part(0), part(1));
        for path in [&first, &second, &dir.path().to_owned()] {
            let found = GgufFile::of_model(path).unwrap().unwrap();
            assert_eq!((found.names().collect::<Vec<_>>(), found.paths().count()), (vec!["t", "u"], 2));
        }
        std::fs::remove_file(&first).unwrap();
        assert!(GgufFile::open(&second).unwrap_err().io().is_some());
    }
}
