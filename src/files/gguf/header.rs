//! The header of a GGUF file, checked before anything in it is believed.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use super::dtype::{DTYPES, GgufDtype, NAMES};
use crate::units::{Fault, FaultKind, abridged, quoted};

pub(super) const MAGIC: [u8; 4] = *b"GGUF";
const VERSIONS: [u32; 2] = [2, 3];
/// The least that a key takes: the length of its name, one byte of it, its type and one byte of value.
const MIN_KEY_BYTES: u64 = 8 + 1 + 4 + 1;
/// The least that a tensor's record takes: its name, the number of its dimensions, one of them, type and offset.
const MIN_TENSOR_BYTES: u64 = 8 + 1 + 4 + 8 + 4 + 8;
const MAX_NAME: u64 = 65_535;
const MAX_DIMS: u32 = 4;
/// A vocabulary has 262 144 tokens and 514 906 merges at most, of those that are known.
const MAX_ITEMS: u64 = 1 << 22;
pub(super) const DEFAULT_ALIGNMENT: u64 = 32;
pub(super) const ARCHITECTURE: &str = "general.architecture";

#[derive(Clone, Debug, PartialEq)]
pub(super) enum GgufValue {
    Integer(i128),
    Float(f64),
    Bool(bool),
    Text(String),
    Integers(Vec<i64>),
    Floats(Vec<f32>),
    /// A list of which nobody asks for the items.
    Bools,
    Texts(Vec<String>),
}

impl GgufValue {
    pub(super) fn shown(&self) -> String {
        match self {
            Self::Integer(value) => value.to_string(),
            Self::Float(value) => value.to_string(),
            Self::Bool(value) => value.to_string(),
            Self::Text(text) => format!("`{}`", quoted(text)),
            Self::Integers(_) | Self::Floats(_) | Self::Bools | Self::Texts(_) => "a list".to_owned(),
        }
    }
}

pub(super) fn wrong(path: &Path, reason: &str) -> Fault {
    let message = format!("`{}` is not a GGUF file that can be read: {reason}", abridged(path.display()));
    Fault::data(message, "fetch the file again, or take another one of the model").of_kind(FaultKind::Damaged)
}

#[derive(Clone, Debug)]
pub(super) struct GgufRecord {
    pub(super) name: String,
    pub(super) part: usize,
    pub(super) dtype: GgufDtype,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: Range<usize>,
}

/// Values by their keys, and where both lie in the file.
pub(super) type GgufStored = BTreeMap<String, (GgufValue, Range<usize>)>;

/// Reads a header from the front; nothing is allocated that the bytes that are left could not fill.
pub(super) struct Reader<'a> {
    pub(super) path: &'a Path,
    pub(super) bytes: &'a [u8],
    pub(super) at: usize,
}

impl<'a> Reader<'a> {
    fn wrong(&self, reason: &str) -> Fault {
        wrong(self.path, reason)
    }

    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    fn take(&mut self, count: u64, what: &str) -> Result<&'a [u8], Fault> {
        if count > self.left() {
            let (at, left) = (self.at, self.left());
            return Err(self.wrong(&format!("it ends inside {what}: {count} bytes expected at {at}, {left} left")));
        }
        let from = self.at;
        self.at += count as usize;
        Ok(&self.bytes[from..self.at])
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Fault> {
        let mut field = [0; N];
        field.copy_from_slice(self.take(N as u64, what)?);
        Ok(field)
    }

    fn u32(&mut self, what: &str) -> Result<u32, Fault> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, Fault> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn text(&mut self, what: &str) -> Result<String, Fault> {
        let length = self.u64(what)?;
        let bytes = self.take(length, what)?;
        let text = std::str::from_utf8(bytes).map_err(|_| self.wrong(&format!("{what} is not UTF-8")))?;
        Ok(text.to_owned())
    }

    /// A count of records, of which each takes so many bytes at least.
    fn records(&mut self, smallest: u64, what: &str) -> Result<u64, Fault> {
        let count = self.u64(what)?;
        if count > self.left() / smallest {
            return Err(self.wrong(&format!("its {what} is {count}, more than its {} bytes can hold", self.bytes.len())));
        }
        Ok(count)
    }

    pub(super) fn header(&mut self, part: usize) -> Result<(GgufStored, Vec<GgufRecord>), Fault> {
        let magic: [u8; 4] = self.array("the magic number")?;
        if magic != MAGIC {
            return Err(self.wrong("it does not begin with `GGUF`"));
        }
        let version = self.u32("the version")?;
        if VERSIONS.contains(&version.swap_bytes()) {
            return Err(self.wrong("its bytes are in big-endian order"));
        }
        if !VERSIONS.contains(&version) {
            return Err(self.wrong(&format!("its version is {version}, expected 2 or 3")));
        }
        let num_tensors = self.records(MIN_TENSOR_BYTES, "tensor count")?;
        let num_keys = self.records(MIN_KEY_BYTES, "key count")?;
        let mut keys = BTreeMap::new();
        for _ in 0..num_keys {
            let (from, name) = (self.at, self.key_name()?);
            let value = self.value(&name)?;
            if keys.insert(name.clone(), (value, from..self.at)).is_some() {
                return Err(self.wrong(&format!("it has the key `{name}` twice")));
            }
        }
        let alignment = match keys.get("general.alignment").map(|(value, _)| value) {
            None => DEFAULT_ALIGNMENT,
            Some(GgufValue::Integer(value)) if let Some(found) = u32::try_from(*value).ok().filter(|n| n.is_power_of_two()) => {
                u64::from(found)
            }
            Some(found) => return Err(self.wrong(&format!("`general.alignment` is {}, expected a power of two", found.shown()))),
        };
        let mut records = Vec::new();
        for _ in 0..num_tensors {
            records.push(self.record(alignment)?);
        }
        let start = (self.at as u64).next_multiple_of(alignment);
        self.place(&mut records, start, part)?;
        Ok((keys, records))
    }

    fn key_name(&mut self) -> Result<String, Fault> {
        let name = self.text("the name of a key")?;
        let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '.' | '_' | '-');
        // Some files have upper case in keys that nobody reads.
        let is_name = !name.is_empty() && name.len() as u64 <= MAX_NAME && name.chars().all(|c| is_plain(c.to_ascii_lowercase()));
        if is_name { Ok(name) } else { Err(self.wrong(&format!("`{}` is no name of a key", quoted(abridged(&name))))) }
    }

    fn value(&mut self, key: &str) -> Result<GgufValue, Fault> {
        let what = format!("`{key}`");
        match self.u32(&what)? {
            9 => self.list(&what),
            kind => self.scalar(kind, &what),
        }
    }

    fn scalar(&mut self, kind: u32, what: &str) -> Result<GgufValue, Fault> {
        Ok(match kind {
            0 => GgufValue::Integer(self.array(what).map(u8::from_le_bytes)?.into()),
            1 => GgufValue::Integer(self.array(what).map(i8::from_le_bytes)?.into()),
            2 => GgufValue::Integer(self.array(what).map(u16::from_le_bytes)?.into()),
            3 => GgufValue::Integer(self.array(what).map(i16::from_le_bytes)?.into()),
            4 => GgufValue::Integer(self.u32(what)?.into()),
            5 => GgufValue::Integer(self.array(what).map(i32::from_le_bytes)?.into()),
            6 => GgufValue::Float(shortest(self.array(what).map(f32::from_le_bytes)?)),
            7 => match self.array::<1>(what)? {
                [0] => GgufValue::Bool(false),
                [1] => GgufValue::Bool(true),
                [found] => return Err(self.wrong(&format!("{what} is {found}, expected 0 or 1"))),
            },
            8 => GgufValue::Text(self.text(what)?),
            10 => GgufValue::Integer(self.u64(what)?.into()),
            11 => GgufValue::Integer(self.array(what).map(i64::from_le_bytes)?.into()),
            12 => GgufValue::Float(self.array(what).map(f64::from_le_bytes)?),
            9 => return Err(self.wrong(&format!("{what} is a list of lists"))),
            kind => return Err(self.wrong(&format!("{what} has the unknown type {kind}"))),
        })
    }

    fn list(&mut self, what: &str) -> Result<GgufValue, Fault> {
        let kind = self.u32(what)?;
        let smallest = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            _ => 8,
        };
        let count = self.records(smallest, &format!("number of items of {what}"))?;
        if count > MAX_ITEMS {
            return Err(self.wrong(&format!("{what} has {count} items, expected {MAX_ITEMS} at most")));
        }
        let items = (0..count).map(|_| self.scalar(kind, what)).collect::<Result<Vec<_>, _>>()?;
        let integer = |item: &GgufValue| if let GgufValue::Integer(value) = item { i64::try_from(*value).ok() } else { None };
        let float = |item: &GgufValue| if let GgufValue::Float(value) = item { Some(*value as f32) } else { None };
        let text = |item| if let GgufValue::Text(value) = item { Some(value) } else { None };
        Ok(match kind {
            6 | 12 => GgufValue::Floats(items.iter().filter_map(float).collect()),
            7 => GgufValue::Bools,
            8 => GgufValue::Texts(items.into_iter().filter_map(text).collect()),
            _ => {
                let too_large = || self.wrong(&format!("{what} holds a number above 2^63"));
                GgufValue::Integers(items.iter().map(|item| integer(item).ok_or_else(too_large)).collect::<Result<_, _>>()?)
            }
        })
    }

    /// A tensor's record; its bytes begin at its offset among the data.
    fn record(&mut self, alignment: u64) -> Result<GgufRecord, Fault> {
        let name = self.text("the name of a tensor")?;
        let what = format!("the record of tensor `{}`", quoted(abridged(&name)));
        let wrong = |of: &Self, reason: &str| of.wrong(&format!("tensor `{}` {reason}", quoted(abridged(&name))));
        let num_dims = self.u32(&what)?;
        if num_dims == 0 || num_dims > MAX_DIMS {
            return Err(wrong(self, &format!("has {num_dims} dimensions, expected 1 to {MAX_DIMS}")));
        }
        let mut shape = (0..num_dims).map(|_| self.u64(&what)).collect::<Result<Vec<_>, _>>()?;
        let (id, offset) = (self.u32(&what)?, self.u64(&what)?);
        shape.reverse();
        let Some(dtype) = DTYPES.into_iter().find(|dtype| dtype.id == id) else {
            let reason = match NAMES.split(' ').nth(id as usize).filter(|name| *name != "-") {
                Some(name) => format!("has the type {name}, which is not read"),
                None => format!("has the unknown type {id}"),
            };
            let known: Vec<&str> = DTYPES.iter().map(|dtype| dtype.name).collect();
            return Err(wrong(self, &reason).with_hint(format!("take a file of the model with types among {}", known.join(", "))));
        };
        let width = shape.last().copied().unwrap_or(1);
        if width % dtype.block as u64 != 0 {
            let GgufDtype { block, name, .. } = dtype;
            return Err(wrong(self, &format!("has rows of {width} numbers, which are no blocks of {block} ({name})")));
        }
        if offset % alignment != 0 {
            return Err(wrong(self, &format!("begins at {offset}, which is no multiple of {alignment}")));
        }
        let numbers = shape.iter().try_fold(1_u64, |all, &size| all.checked_mul(size));
        let bytes = numbers.and_then(|all| (all / dtype.block as u64).checked_mul(dtype.bytes as u64));
        let end = bytes.and_then(|bytes| offset.checked_add(bytes)).and_then(|end| usize::try_from(end).ok());
        let (Some(end), Ok(from)) = (end.filter(|&end| end < usize::MAX / 2), usize::try_from(offset)) else {
            return Err(wrong(self, &format!("is of {shape:?} numbers, more than any file holds")));
        };
        let shape = shape.into_iter().map(|size| size as usize).collect();
        Ok(GgufRecord { name, part: 0, dtype, shape, bytes: from..end })
    }

    /// Counts the records' bytes from the start of the file, none of which may reach beyond its end or into another's.
    fn place(&self, records: &mut [GgufRecord], start: u64, part: usize) -> Result<(), Fault> {
        let start = usize::try_from(start).unwrap_or(usize::MAX / 2);
        for record in &mut *records {
            (record.part, record.bytes) = (part, start + record.bytes.start..start + record.bytes.end);
        }
        records.sort_by_key(|record| record.bytes.start);
        let mut end = start;
        for record in records {
            let name = quoted(abridged(&record.name));
            let (from, to, size) = (record.bytes.start, record.bytes.end, self.bytes.len());
            if to > size {
                return Err(self.wrong(&format!("it ends inside tensor `{name}`, which takes bytes {from} to {to} of {size}")));
            }
            if from < end {
                return Err(self.wrong(&format!("tensor `{name}` begins at {from} inside another one")));
            }
            end = to;
        }
        Ok(())
    }
}

/// The number of the fewest digits that an f32 stands for, as 1e-5 and not 9.999999747378752e-6.
fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or_else(|_| x.into())
}
