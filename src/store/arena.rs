//! Where tensors wait: stretches of the host's memory, or one scratch file. What is freed is used again, within a step and in the
//! next, so that neither grows from step to step.

use std::path::PathBuf;

use tch::{Device, Kind, Tensor};

use super::StoreError;
use super::ranges::{Ranges, aligned};
use crate::files::Scratch;
use crate::units::Bytes;

/// What is taken at once of memory or disk: at least this, then as much again as there is, up to [`LARGEST_STEP`].
const FIRST_STEP: u64 = 1 << 20;
const LARGEST_STEP: u64 = 256 << 20;

/// Tensors side by side in one piece of an arena.
#[derive(Debug)]
pub(super) struct Piece {
    /// Which stretch of memory; 0 in a file.
    stretch: usize,
    start: u64,
    len: u64,
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    /// From the beginning of the stretch or file.
    at: u64,
    size: Vec<i64>,
    kind: Kind,
}

impl Part {
    fn len(&self) -> u64 {
        (self.size.iter().product::<i64>() as usize * self.kind.elt_size_in_bytes()) as u64
    }
}

impl Piece {
    /// What it takes.
    pub(super) fn bytes(&self) -> Bytes {
        Bytes(self.len)
    }
}

/// What an arena takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// What tensors that wait take now.
    pub in_use: Bytes,
    /// The most that they have taken at once.
    pub most: Bytes,
    /// Memory that was asked for; 0 for a file.
    pub memory: Bytes,
    /// How much of it has ever been used: the system gives memory when it is touched.
    pub touched: Bytes,
    /// The length of the file, all of which is taken on the disk; 0 without one.
    pub file: Bytes,
}

/// The two kinds of places.
#[derive(Debug)]
enum Place {
    Memory(Vec<(Tensor, Ranges)>),
    File(Box<InFile>),
}

/// A scratch file, which is made when the first tensor comes.
#[derive(Debug)]
struct InFile {
    dir: Option<PathBuf>,
    purpose: &'static str,
    scratch: Option<Scratch>,
    ranges: Ranges,
    /// On the way between tensor and file.
    bytes: Vec<u8>,
}

/// A place for tensors, with what is free in it.
#[derive(Debug)]
pub(super) struct Arena {
    place: Place,
    in_use: Bytes,
    most: Bytes,
}

impl Arena {
    pub(super) fn in_memory() -> Self {
        Self { place: Place::Memory(Vec::new()), in_use: Bytes(0), most: Bytes(0) }
    }

    /// `purpose` is part of the file's name. Without a directory the first tensor is refused.
    pub(super) fn in_file(dir: Option<PathBuf>, purpose: &'static str) -> Self {
        let file = InFile { dir, purpose, scratch: None, ranges: Ranges::default(), bytes: Vec::new() };
        Self { place: Place::File(Box::new(file)), in_use: Bytes(0), most: Bytes(0) }
    }

    pub(super) fn taken(&self) -> Taken {
        let Self { in_use, most, .. } = *self;
        match &self.place {
            Place::Memory(stretches) => {
                let sum = |of: fn(&Ranges) -> u64| Bytes(stretches.iter().map(|(_, ranges)| of(ranges)).sum());
                Taken { in_use, most, memory: sum(Ranges::end), touched: sum(Ranges::touched), file: Bytes(0) }
            }
            Place::File(file) => {
                Taken { in_use, most, file: file.scratch.as_ref().map_or(Bytes(0), Scratch::len), ..Taken::default() }
            }
        }
    }

    /// Copies tensors of any device into a piece of their own.
    pub(super) fn put(&mut self, tensors: &[Tensor]) -> Result<Piece, StoreError> {
        let mut len = 0;
        let mut parts = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let part = Part { at: len, size: tensor.size(), kind: tensor.kind() };
            len += aligned(part.len());
            parts.push(part);
        }
        let (stretch, start) = match &mut self.place {
            Place::Memory(stretches) => take_memory(stretches, len),
            Place::File(file) => (0, file.take(len)?),
        };
        for part in &mut parts {
            part.at += start;
        }
        // From here on dropping the piece without giving it back would lose its room.
        let piece = Piece { stretch, start, len, parts };
        self.in_use.0 += len;
        self.most = self.most.max(self.in_use);
        match self.write(&piece, tensors) {
            Ok(()) => Ok(piece),
            Err(error) => {
                self.free(&piece);
                Err(error)
            }
        }
    }

    fn write(&mut self, piece: &Piece, tensors: &[Tensor]) -> Result<(), StoreError> {
        for (part, tensor) in piece.parts.iter().zip(tensors).filter(|(part, _)| part.len() > 0) {
            match &mut self.place {
                Place::Memory(stretches) => seen(&stretches[piece.stretch].0, part).copy_(tensor),
                Place::File(file) => file.write(part, tensor)?,
            }
        }
        Ok(())
    }

    /// Copies of a piece's tensors on a device.
    pub(super) fn get(&mut self, piece: &Piece, device: Device) -> Result<Vec<Tensor>, StoreError> {
        let place = &mut self.place;
        let one = |part: &Part| {
            if part.len() == 0 {
                return Ok(Tensor::empty(&part.size[..], (part.kind, device)));
            }
            match &mut *place {
                // A copy on the CPU too: the room may be another tensor's before the caller is done.
                Place::Memory(stretches) => {
                    Ok(seen(&stretches[piece.stretch].0, part).to_device_(device, part.kind, false, true))
                }
                Place::File(file) => Ok(file.read(part)?.to_device(device)),
            }
        };
        piece.parts.iter().map(one).collect()
    }

    /// Gives a piece's room back.
    pub(super) fn free(&mut self, piece: &Piece) {
        let ranges = match &mut self.place {
            Place::Memory(stretches) => &mut stretches[piece.stretch].1,
            Place::File(file) => &mut file.ranges,
        };
        if piece.len > 0 {
            ranges.give(piece.start, piece.len);
        }
        self.in_use.0 -= piece.len;
    }
}

/// The one place where memory of the host is asked for. It is not touched before tensors come to wait there.
fn host_memory(len: u64) -> Tensor {
    Tensor::empty([len as i64], (Kind::Uint8, Device::Cpu))
}

fn take_memory(stretches: &mut Vec<(Tensor, Ranges)>, len: u64) -> (usize, u64) {
    if len == 0 {
        if stretches.is_empty() {
            stretches.push((host_memory(0), Ranges::default()));
        }
        return (0, 0);
    }
    for (stretch, (_, ranges)) in stretches.iter_mut().enumerate() {
        if let Some(start) = ranges.take(len) {
            return (stretch, start);
        }
    }
    let have = stretches.iter().map(|(_, ranges)| ranges.end()).sum();
    let more = step(have).max(len);
    let mut ranges = Ranges::default();
    ranges.grow(more);
    let start = ranges.take(len).unwrap_or_default();
    stretches.push((host_memory(more), ranges));
    (stretches.len() - 1, start)
}

/// How much more to ask for beside `have`.
fn step(have: u64) -> u64 {
    have.clamp(FIRST_STEP, LARGEST_STEP)
}

/// A part of a stretch of memory as the tensor that lies there.
fn seen(stretch: &Tensor, part: &Part) -> Tensor {
    stretch.narrow(0, part.at as i64, part.len() as i64).view_dtype(part.kind).view(&part.size[..])
}

impl InFile {
    fn take(&mut self, len: u64) -> Result<u64, StoreError> {
        if len == 0 {
            return Ok(0);
        }
        if let Some(start) = self.ranges.take(len) {
            return Ok(start);
        }
        let scratch = match &mut self.scratch {
            Some(scratch) => scratch,
            empty => {
                let dir = self.dir.as_deref().ok_or(StoreError::NoScratchDir)?;
                empty.insert(Scratch::create(dir, self.purpose)?)
            }
        };
        let (have, missing) = (self.ranges.end(), self.ranges.missing(len));
        let Bytes(len_now) = scratch.grow(have + missing, have + missing.max(step(have)))?;
        self.ranges.grow(len_now - have);
        Ok(self.ranges.take(len).unwrap_or_default())
    }

    fn write(&mut self, part: &Part, tensor: &Tensor) -> Result<(), StoreError> {
        let host = tensor.to_device(Device::Cpu).contiguous();
        let len = part.len() as usize;
        if self.bytes.len() < len {
            self.bytes.resize(len, 0);
        }
        host.f_copy_data_u8(&mut self.bytes[..len], host.numel()).map_err(|e| refused(&e))?;
        let scratch = self.scratch.as_ref().ok_or(StoreError::NoScratchDir)?;
        Ok(scratch.write_at(part.at, &self.bytes[..len])?)
    }

    fn read(&mut self, part: &Part) -> Result<Tensor, StoreError> {
        let len = part.len() as usize;
        if self.bytes.len() < len {
            self.bytes.resize(len, 0);
        }
        let scratch = self.scratch.as_ref().ok_or(StoreError::NoScratchDir)?;
        scratch.read_at(part.at, &mut self.bytes[..len])?;
        Tensor::f_from_data_size(&self.bytes[..len], &part.size, part.kind).map_err(|e| refused(&e))
    }
}

fn refused(error: &tch::TchError) -> StoreError {
    StoreError::Torch { name: "a tensor that waits".into(), reason: error.to_string() }
}
