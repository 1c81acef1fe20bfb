//! Safetensors: opened as memory, checked before anything in it is believed, written whole.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};

use super::atomic::write_atomic_with;
use super::{FileKind, json, map_file};
use crate::native::FileMap;
use crate::units::{Fault, FaultKind, abridged, quoted};

const LENGTH: usize = 8;
/// The format's own limit for the header.
const MAX_HEADER: u64 = 100_000_000;
const METADATA: &str = "__metadata__";

/// An open safetensors file; its tensors are views into memory that the system reads when they are looked at.
#[derive(Clone, Debug)]
pub struct TensorFile {
    path: PathBuf,
    map: Arc<FileMap>,
    start: usize,
    header: Metadata,
}

/// A tensor as it lies in a file; the last axis is innermost.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a, D = Dtype> {
    pub dtype: D,
    pub shape: &'a [usize],
    /// The elements, each in little-endian order.
    pub bytes: &'a [u8],
    pub offset: usize,
    pub map: &'a Arc<FileMap>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct RawTensor<'a> {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// The elements, little-endian, the last axis innermost.
    pub bytes: Cow<'a, [u8]>,
}

impl TensorFile {
    /// Opens and checks a file: header length, keys given twice, shapes, holes, overlaps, missing and trailing bytes.
    pub fn open(path: &Path) -> Result<Self, Fault> {
        let map = map_file(path, FileKind::Tensors)?;
        let size = map.bytes().len() as u64;
        if size < LENGTH as u64 {
            return Err(truncated(path, LENGTH as u64, size));
        }
        let (header, start) = read_header(path, map.bytes())?;
        let expected = (start + header.data_len()) as u64;
        match size {
            size if size < expected => Err(truncated(path, expected, size)),
            size if size > expected => Err(wrong(path, format!("expected {expected} bytes, found {size}"))),
            _ => Ok(Self { path: path.to_path_buf(), map, start, header }),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors' names, in the order of their bytes.
    pub fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    pub fn contains(&self, name: &str) -> bool {
        self.header.info(name).is_some()
    }

    pub fn get(&self, name: &str) -> Result<TensorView<'_>, Fault> {
        let missing = || {
            let message = format!("`{}` has no tensor `{}`", abridged(self.path.display()), quoted(name));
            Fault::data(message, "check that the file belongs to this model").of_kind(FaultKind::Damaged)
        };
        let info = self.header.info(name).ok_or_else(missing)?;
        let (from, to) = (self.start + info.data_offsets.0, self.start + info.data_offsets.1);
        Ok(TensorView { dtype: info.dtype, shape: &info.shape, bytes: &self.map.bytes()[from..to], offset: from, map: &self.map })
    }

    /// The file with other names for its tensors, each of which is one's own.
    pub fn renamed(self, name: impl Fn(String) -> String) -> Result<Self, Fault> {
        let named = |old: String| self.header.info(&old).cloned().map(|info| (name(old), info));
        let tensors: Vec<_> = self.names().into_iter().filter_map(named).collect();
        let count = tensors.len();
        let header = Metadata::new(self.header.metadata().clone(), tensors).map_err(|error| wrong(&self.path, error))?;
        if header.tensors().len() < count {
            return Err(wrong(&self.path, "a tensor is there under two names"));
        }
        Ok(Self { header, ..self })
    }

    /// Lets go of the memory into which a tensor was read; it is read again by who looks again.
    pub fn release(&self, name: &str) {
        if let Some(info) = self.header.info(name) {
            self.map.release(self.start + info.data_offsets.0..self.start + info.data_offsets.1);
        }
    }

    pub fn metadata(&self) -> BTreeMap<String, String> {
        self.header.metadata().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect()
    }
}

fn damaged(message: String) -> Fault {
    Fault::data(message, "name a safetensors file; if this is one, its copy is damaged: fetch it again")
        .of_kind(FaultKind::Damaged)
}

fn truncated(path: &Path, expected: u64, found: u64) -> Fault {
    damaged(format!("`{}` is truncated: expected {expected} bytes, found {found}", abridged(path.display())))
}

fn wrong(path: &Path, reason: impl Display) -> Fault {
    damaged(format!("`{}` is not a valid safetensors file: {}", abridged(path.display()), abridged(reason)))
}

fn read_header(path: &Path, bytes: &[u8]) -> Result<(Metadata, usize), Fault> {
    let mut field = [0; LENGTH];
    field.copy_from_slice(&bytes[..LENGTH]);
    let length = u64::from_le_bytes(field);
    if length > MAX_HEADER {
        return Err(wrong(path, format!("its header claims {length} bytes, expected at most {MAX_HEADER}")));
    }
    let start = LENGTH + length as usize;
    let Some(text) = bytes.get(LENGTH..start) else {
        return Err(truncated(path, start as u64, bytes.len() as u64));
    };
    if text.first() != Some(&b'{') {
        return Err(wrong(path, "its header does not begin with `{`"));
    }
    // The parser below would let the last of two equal names win, others the first.
    json::check_keys(text, FileKind::Tensors.max_values()).map_err(|e| wrong(path, format!("header: {e}")))?;
    let header = serde_json::from_slice::<Metadata>(text).map_err(|e| wrong(path, format!("header: {e}")))?;
    Ok((header, start))
}

/// What a header says of a tensor that is to be written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorHead<D = Dtype> {
    pub name: String,
    pub dtype: D,
    pub shape: Vec<usize>,
}

impl TensorHead {
    pub fn num_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// Writes a safetensors file, atomically. The same tensors and text pairs give the same bytes.
pub fn write_tensors(path: &Path, tensors: &[RawTensor<'_>], metadata: &BTreeMap<String, String>) -> Result<(), Fault> {
    let head = |of: &RawTensor<'_>| TensorHead { name: of.name.clone(), dtype: of.dtype, shape: of.shape.clone() };
    let heads: Vec<TensorHead> = tensors.iter().map(head).collect();
    write_tensors_streamed(path, &heads, metadata, |index| Ok(Cow::Borrowed(&*tensors[index].bytes)))
}

/// Does what [`write_tensors`] does, for tensors of which only one is in memory at a time: `bytes` is asked for each by its index, once.
pub fn write_tensors_streamed<'a>(
    path: &Path,
    heads: &[TensorHead],
    metadata: &BTreeMap<String, String>,
    mut bytes: impl FnMut(usize) -> Result<Cow<'a, [u8]>, Fault>,
) -> Result<(), Fault> {
    // Wide types first, so that every tensor is aligned; then by name, whatever order the caller has.
    let mut order: Vec<usize> = (0..heads.len()).collect();
    order.sort_by(|&a, &b| (heads[b].dtype, &heads[a].name).cmp(&(heads[a].dtype, &heads[b].name)));
    let header = encode_header(order.iter().map(|&index| &heads[index]), metadata).map_err(|reason| wrong(path, reason))?;
    let header = [&(header.len() as u64).to_le_bytes()[..], &header].concat();
    write_atomic_with(path, |file| {
        file.write_all(&header)?;
        for index in order {
            let (head, bytes) = (&heads[index], bytes(index)?);
            if bytes.len() != head.num_bytes() {
                let (TensorHead { name, shape, dtype }, found) = (head, bytes.len());
                return Err(wrong(path, format!("`{name}` of shape {shape:?} and type {dtype} has {found} bytes")).into());
            }
            file.write_all(&bytes)?;
        }
        Ok(())
    })
}

fn encode_header<'a>(
    tensors: impl Iterator<Item = &'a TensorHead>,
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<u8>, String> {
    let mut header = serde_json::Map::new();
    if !metadata.is_empty() {
        header.insert(METADATA.into(), serde_json::json!(metadata));
    }
    let (mut start, mut names) = (0, HashSet::from([METADATA]));
    for tensor in tensors {
        let end = start + tensor.num_bytes();
        if !names.insert(&tensor.name) {
            return Err(format!("two tensors would be called `{}`", tensor.name));
        }
        let info = TensorInfo { dtype: tensor.dtype, shape: tensor.shape.clone(), data_offsets: (start, end) };
        header.insert(tensor.name.clone(), serde_json::json!(info));
        start = end;
    }
    let mut text = serde_json::to_vec(&header).map_err(|e| e.to_string())?;
    text.resize(text.len().next_multiple_of(LENGTH), b' ');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn raw(name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> RawTensor<'static> {
        RawTensor { name: name.into(), dtype, shape: shape.into(), bytes: bytes.to_vec().into() }
    }

    fn file_of(dir: &Path, header: &str, data: &[u8]) -> PathBuf {
        let path = dir.join("x.safetensors");
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat();
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn sample(dir: &Path) -> PathBuf {
        let path = dir.join("x.safetensors");
        let tensors = [
            raw("flag", Dtype::BOOL, &[1], &[1]),
            raw("b", Dtype::F32, &[2, 1], &[0, 0, 128, 63, 0, 0, 0, 64]),
            raw("a", Dtype::F32, &[], &[0, 0, 64, 64]),
            raw("empty", Dtype::I64, &[0, 3], &[]),
        ];
        write_tensors(&path, &tensors, &BTreeMap::from([("format".into(), "pt".into())])).unwrap();
        path
    }

    #[test]
    fn what_is_written_is_read_back_and_others_can_read_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = sample(dir.path());
        let file = TensorFile::open(&path).unwrap();
        assert_eq!(file.names().len(), 4);
        assert_eq!(file.metadata()["format"], "pt");
        let b = file.get("b").unwrap();
        assert_eq!((b.dtype, b.shape, b.bytes), (Dtype::F32, &[2, 1][..], &[0, 0, 128, 63, 0, 0, 0, 64][..]));
        assert_eq!(&b.map.bytes()[b.offset..b.offset + 8], b.bytes);
        assert!(file.contains("empty") && file.get("a").unwrap().offset.is_multiple_of(4));
        assert!(file.get("c").unwrap_err().to_string().ends_with("has no tensor `c`"));
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(safetensors::SafeTensors::deserialize(&bytes).unwrap().len(), 4);
    }

    #[test]
    fn every_truncation_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = sample(dir.path());
        let whole = std::fs::read(&path).unwrap();
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            let error = TensorFile::open(&path).unwrap_err();
            assert!(error.to_string().contains("is truncated: expected"), "{length}: {error}");
        }
        std::fs::write(&path, [&whole[..], &[0]].concat()).unwrap();
        assert!(TensorFile::open(&path).unwrap_err().to_string().contains("found"));
    }

    #[test]
    fn malformed_headers_are_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let u8 = |from: usize, to: usize| format!(r#"{{"dtype":"U8","shape":[{}],"data_offsets":[{from},{to}]}}"#, to - from);
        let cases = [
            (format!(r#"{{"w":{},"w":{}}}"#, u8(0, 4), u8(0, 4)), "`w` stands twice"),
            (r#"{"w":{"dtype":"U8","shape":[4],"shape":[4],"data_offsets":[0,4]}}"#.into(), "`shape` stands twice"),
            (format!(r#"{{"a":{},"b":{}}}"#, u8(0, 2), u8(1, 4)), "offset"),
            (format!(r#"{{"a":{},"b":{}}}"#, u8(0, 1), u8(2, 4)), "offset"),
            (r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#.into(), "header"),
            (r#"{"w":{"dtype":"F32","shape":[4611686018427387904,8],"data_offsets":[0,4]}}"#.into(), "overflow"),
            (r#"{"w":{"dtype":"Q7","shape":[4],"data_offsets":[0,4]}}"#.into(), "Q7"),
            ("[1]".into(), "`{`"),
            ("{".into(), "header"),
        ];
        for (header, expected) in cases {
            let error = TensorFile::open(&file_of(dir.path(), &header, &[0; 4])).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("x.safetensors"), "{header}: {error}");
        }
        let huge = dir.path().join("huge");
        std::fs::write(&huge, u64::MAX.to_le_bytes()).unwrap();
        assert!(TensorFile::open(&huge).unwrap_err().to_string().contains("at most"));
        assert_eq!(TensorFile::open(dir.path()).unwrap_err().kind(), FaultKind::NotRegular);
    }

    #[test]
    fn tensors_that_cannot_be_read_back_are_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let (a, short) = (raw("a", Dtype::U8, &[1], &[1]), raw("b", Dtype::F32, &[1], &[1]));
        for wrong in [vec![a.clone(), a.clone()], vec![short], vec![raw(METADATA, Dtype::U8, &[1], &[1])]] {
            assert!(write_tensors(&path, &wrong, &BTreeMap::new()).is_err());
        }
        assert!(!path.exists());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn damaged_files_never_crash(at in 0usize..300, value: u8) {
            let dir = tempfile::tempdir().unwrap();
            let path = sample(dir.path());
            let mut bytes = std::fs::read(&path).unwrap();
            let at = at % bytes.len();
            bytes[at] = value;
            std::fs::write(&path, bytes).unwrap();
            if let Ok(file) = TensorFile::open(&path) {
                for name in file.names() {
                    file.get(&name).unwrap();
                }
            }
        }
    }
}
