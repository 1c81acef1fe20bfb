//! Where tensors wait: segments of the host's memory, or one scratch file. What is freed is used again, within a step and in the
//! next, so that neither grows from step to step.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tch::{Device, TchError, Tensor};

use super::copier::{Copier, CopyMark, CopyStream, copier_of};
use super::segments::{Ranges, Segment, TensorRange, aligned, step, take};
use crate::files::Scratch;
use crate::native::cuda::upload;
use crate::native::locked;
use crate::units::{Bytes, Fault, abridged};

/// Tensors that wait side by side in a piece of an arena, whose room is free again when this is dropped.
#[derive(Debug)]
pub(super) struct Offloaded {
    arena: Arc<Mutex<Arena>>,
    /// Which segment of memory; 0 in a file.
    segment: usize,
    start: u64,
    len: u64,
    parts: Vec<TensorRange>,
    copier: Arc<dyn Copier>,
    came: CopyMark,
    /// When the last copy that was asked for is done.
    left: Mutex<CopyMark>,
}

impl Offloaded {
    /// Copies tensors of a device into a piece of their own. They must not be written to any more.
    pub(super) fn new(arena: &Arc<Mutex<Arena>>, tensors: &[Tensor]) -> Result<Self, Fault> {
        let began = Instant::now();
        let mut len = 0;
        let mut parts = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let part = TensorRange { at: len, size: tensor.size(), kind: tensor.kind() };
            len += aligned(part.len());
            parts.push(part);
        }
        let device = tensors.first().map_or(Device::Cpu, Tensor::device);
        let copier = locked(arena).copier(device);
        let (segment, start) = locked(arena).take(len, device)?;
        for part in &mut parts {
            part.at += start;
        }
        let (came, left) = (CopyMark::PAST, Mutex::new(CopyMark::PAST));
        let mut piece = Self { arena: arena.clone(), segment, start, len, parts, copier, came, left };
        let written = locked(arena).write(&mut piece, tensors);
        locked(arena).copied += began.elapsed();
        written.map(|()| piece)
    }

    /// Sets copies out to a device, for the caller to keep. The room may be given back before they have come.
    pub(super) fn get(&self, device: Device) -> Result<Coming, Fault> {
        locked(&self.arena).get(self, device)
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> Bytes {
        Bytes(self.len)
    }

    /// Whether what was put there has come, so that the host may read it without waiting.
    pub(super) fn has_come(&self) -> bool {
        self.copier.is_done(self.came)
    }
}

impl Drop for Offloaded {
    fn drop(&mut self) {
        locked(&self.arena).free(self);
    }
}

/// Tensors that are there, or copies that are on their way to a device.
#[derive(Debug)]
pub(super) struct Coming {
    /// They may not be there yet.
    pub(super) tensors: Vec<Tensor>,
    copier: Arc<dyn Copier>,
    done: CopyMark,
}

impl Coming {
    pub(super) fn here(tensors: Vec<Tensor>) -> Self {
        Self { tensors, copier: copier_of(Device::Cpu), done: CopyMark::PAST }
    }

    /// The tensors, for which the device waits if they are not there yet.
    pub(super) fn wait(&self) -> Vec<Tensor> {
        self.copier.wait(self.done);
        self.tensors.iter().map(Tensor::shallow_clone).collect()
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreUsage {
    /// What tensors that wait take now.
    pub in_use: Bytes,
    pub most: Bytes,
    /// Memory that was asked for; 0 for a file.
    pub memory: Bytes,
    /// How much of it has ever been used: the system gives memory when it is touched. Pinned memory is all there at once.
    pub touched: Bytes,
    pub pinned: Bytes,
    /// The length of the file, all of which is taken on the disk; 0 without one.
    pub file: Bytes,
}

#[derive(Debug)]
enum ArenaKind {
    Memory(Vec<Segment>),
    File(Box<InFile>),
}

/// A scratch file, which is made when the first tensor comes.
#[derive(Debug)]
struct InFile {
    dir: Option<PathBuf>,
    scratch: Option<Scratch>,
    ranges: Ranges,
    /// What bytes pass through to the file and back, as long as the largest tensor so far; measured with the process, and not in [`StoreUsage`].
    staging: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct Arena {
    place: ArenaKind,
    in_use: Bytes,
    most: Bytes,
    pub(super) copied: Duration,
    /// A copier for every device. By default each device has its own.
    copier: Option<Arc<dyn Copier>>,
}

impl Arena {
    pub(super) fn in_memory() -> Self {
        Self::at(ArenaKind::Memory(Vec::new()))
    }

    /// Without a directory the first tensor is refused.
    pub(super) fn in_file(dir: Option<PathBuf>) -> Self {
        let file = InFile { dir, scratch: None, ranges: Ranges::default(), staging: Vec::new() };
        Self::at(ArenaKind::File(Box::new(file)))
    }

    fn at(place: ArenaKind) -> Self {
        Self { place, in_use: Bytes(0), most: Bytes(0), copied: Duration::ZERO, copier: None }
    }

    #[cfg(test)]
    pub(super) fn copied_by(copier: Arc<dyn Copier>) -> Self {
        Self { copier: Some(copier), ..Self::in_memory() }
    }

    pub(super) fn usage(&self) -> StoreUsage {
        let Self { in_use, most, .. } = *self;
        match &self.place {
            ArenaKind::Memory(segments) => {
                let sum = |of: fn(&Segment) -> u64| Bytes(segments.iter().map(of).sum());
                let memory = sum(|segment| segment.ranges.end);
                let touched = sum(|s| if s.is_pinned { s.ranges.end } else { s.ranges.touched });
                let pinned = sum(|s| if s.is_pinned { s.ranges.end } else { 0 });
                StoreUsage { in_use, most, memory, touched, pinned, file: Bytes(0) }
            }
            ArenaKind::File(file) => {
                StoreUsage { in_use, most, file: file.scratch.as_ref().map_or(Bytes(0), Scratch::len), ..StoreUsage::default() }
            }
        }
    }

    fn copier(&self, device: Device) -> Arc<dyn Copier> {
        self.copier.clone().unwrap_or_else(|| copier_of(device))
    }

    /// Takes room for so many bytes that come from a device: the segment of memory, and where it begins there or in the file.
    fn take(&mut self, len: u64, device: Device) -> Result<(usize, u64), Fault> {
        let room = match &mut self.place {
            ArenaKind::Memory(segments) => take(segments, len, device),
            ArenaKind::File(file) => (0, file.take(len)?),
        };
        self.in_use.0 += len;
        self.most = self.most.max(self.in_use);
        Ok(room)
    }

    fn write(&mut self, piece: &mut Offloaded, tensors: &[Tensor]) -> Result<(), Fault> {
        let parts = piece.parts.iter().zip(tensors).filter(|(part, _)| part.len() > 0);
        match &mut self.place {
            ArenaKind::Memory(segments) => {
                let segment = &mut segments[piece.segment];
                let after = segment.before_writing(piece.start, piece.len, &piece.copier);
                let targets: Vec<(Tensor, &Tensor)> = parts.map(|(part, tensor)| (segment.seen(part), tensor)).collect();
                let copies: Vec<(&Tensor, &Tensor)> = targets.iter().map(|(to, from)| (to, *from)).collect();
                piece.came = piece.copier.start(CopyStream::ToHost, &copies, &after);
                Ok(())
            }
            ArenaKind::File(file) => parts.into_iter().try_for_each(|(part, tensor)| file.write(part, tensor)),
        }
    }

    fn get(&mut self, piece: &Offloaded, device: Device) -> Result<Coming, Fault> {
        let began = Instant::now();
        let copier = self.copier(device);
        let coming = match &mut self.place {
            ArenaKind::Memory(segments) => from_memory(&segments[piece.segment], piece, device, copier),
            ArenaKind::File(file) => {
                let one = |part: &TensorRange| match part.len() {
                    0 => Ok(Tensor::empty(&part.size[..], (part.kind, device))),
                    _ => Ok(upload(&file.read(part)?, device)),
                };
                let tensors = piece.parts.iter().map(one).collect::<Result<_, Fault>>()?;
                Coming { tensors, copier, done: CopyMark::PAST }
            }
        };
        self.copied += began.elapsed();
        Ok(coming)
    }

    fn free(&mut self, piece: &Offloaded) {
        self.in_use.0 -= piece.len;
        if piece.len == 0 {
            return;
        }
        match &mut self.place {
            ArenaKind::Memory(segments) => {
                segments[piece.segment].give(piece.start, piece.len, &piece.copier, [piece.came, *locked(&piece.left)]);
            }
            ArenaKind::File(file) => file.ranges.give(piece.start, piece.len),
        }
    }
}

pub(super) fn moved(x: &Tensor, device: Device) -> Tensor {
    if x.device() == device { x.shallow_clone() } else { upload(x, device) }
}

/// Also a copy on the CPU: another tensor may get the memory before the caller is done.
fn from_memory(segment: &Segment, piece: &Offloaded, device: Device, copier: Arc<dyn Copier>) -> Coming {
    let tensors: Vec<Tensor> = piece.parts.iter().map(|part| Tensor::empty(&part.size[..], (part.kind, device))).collect();
    let parts = piece.parts.iter().zip(&tensors).filter(|(part, _)| part.len() > 0);
    let sources: Vec<(&Tensor, Tensor)> = parts.map(|(part, to)| (to, segment.seen(part))).collect();
    let copies: Vec<(&Tensor, &Tensor)> = sources.iter().map(|(to, from)| (*to, from)).collect();
    let done = if Arc::ptr_eq(&copier, &piece.copier) {
        let done = copier.start(CopyStream::ToDevice, &copies, &[piece.came]);
        *locked(&piece.left) = done;
        done
    } else {
        // From one device to another nobody knows both orders but the host.
        piece.copier.finish(piece.came);
        let done = copier.start(CopyStream::ToDevice, &copies, &[]);
        copier.finish(done);
        done
    };
    Coming { tensors, copier, done }
}

impl InFile {
    fn take(&mut self, len: u64) -> Result<u64, Fault> {
        if len == 0 {
            return Ok(0);
        }
        if let Some(start) = self.ranges.take(len) {
            return Ok(start);
        }
        let scratch = match (&mut self.scratch, &self.dir) {
            (Some(scratch), _) => scratch,
            (empty, Some(dir)) => empty.insert(Scratch::create(dir)?),
            (None, None) => return Err(no_scratch_dir()),
        };
        let (have, missing) = (self.ranges.end, self.ranges.missing(len));
        let Bytes(len_now) = scratch.grow(have + missing, have + missing.max(step(have)))?;
        self.ranges.grow(len_now - have);
        Ok(self.ranges.take(len).unwrap_or_default())
    }

    fn write(&mut self, part: &TensorRange, tensor: &Tensor) -> Result<(), Fault> {
        let host = tensor.to_device(Device::Cpu).contiguous();
        let bytes = beginning(&mut self.staging, part.len());
        host.f_copy_data_u8(bytes, host.numel()).map_err(|e| copy_failed(&e))?;
        self.scratch.as_ref().ok_or_else(no_scratch_dir)?.write_at(part.at, bytes)
    }

    fn read(&mut self, part: &TensorRange) -> Result<Tensor, Fault> {
        let bytes = beginning(&mut self.staging, part.len());
        self.scratch.as_ref().ok_or_else(no_scratch_dir)?.read_at(part.at, bytes)?;
        Tensor::f_from_data_size(bytes, &part.size, part.kind).map_err(|e| copy_failed(&e))
    }
}

/// The first `len` bytes of a buffer, which grows if it is shorter.
fn beginning(buffer: &mut Vec<u8>, len: u64) -> &mut [u8] {
    let len = len as usize;
    buffer.resize(buffer.len().max(len), 0);
    &mut buffer[..len]
}

fn copy_failed(error: &TchError) -> Fault {
    Fault::failed(format!("the store could not copy a tensor: {}", abridged(error))).with_hint("free memory of the host")
}

fn no_scratch_dir() -> Fault {
    Fault::usage(
        "no directory is given for scratch files",
        "give the recipe `grad.scratch_dir`, or an `output_dir` for a default",
    )
}
