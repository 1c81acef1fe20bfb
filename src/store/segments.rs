//! Segments of the host's memory, and what is still on its way to and from them: a range that was given back is not written again
//! before the copies from it are done.

use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::copier::{Copier, CopyMark};
use super::ranges::Ranges;
use crate::native::cuda::host_memory;

/// What is taken at once of memory or disk: at least this, then as much again as there is, up to [`MAX_STEP`].
const FIRST_STEP: u64 = 1 << 20;
const MAX_STEP: u64 = 256 << 20;

/// How much more to ask for beside `have`.
pub(super) fn step(have: u64) -> u64 {
    have.clamp(FIRST_STEP, MAX_STEP)
}

#[derive(Debug)]
pub(super) struct TensorRange {
    /// From the beginning of the segment or file.
    pub(super) at: u64,
    pub(super) size: Vec<i64>,
    pub(super) kind: Kind,
}

impl TensorRange {
    pub(super) fn len(&self) -> u64 {
        (self.size.iter().product::<i64>() as usize * self.kind.elt_size_in_bytes()) as u64
    }
}

#[derive(Debug)]
pub(super) struct Segment {
    memory: Tensor,
    pub(super) ranges: Ranges,
    /// Memory that is pinned is there from the beginning, touched or not.
    pub(super) is_pinned: bool,
    leaving: Vec<Leaving>,
}

/// A range that was given back while copies to or from it may be under way.
#[derive(Debug)]
struct Leaving {
    start: u64,
    end: u64,
    copier: Arc<dyn Copier>,
    marks: [CopyMark; 2],
}

impl Leaving {
    fn is_done(&self) -> bool {
        self.marks.iter().all(|&mark| self.copier.is_done(mark))
    }
}

impl Segment {
    /// So much memory for tensors of a device, all of it free. It is not touched before tensors come to wait there.
    fn new(len: u64, device: Device) -> Self {
        let mut ranges = Ranges::default();
        if len > 0 {
            ranges.grow(len);
        }
        let (memory, is_pinned) = host_memory(len as i64, device);
        Self { memory, ranges, is_pinned, leaving: Vec::new() }
    }

    pub(super) fn seen(&self, part: &TensorRange) -> Tensor {
        self.memory.narrow(0, part.at as i64, part.len() as i64).view_dtype(part.kind).view(&part.size[..])
    }

    /// Gives a range back, to be written again when `marks` are done.
    pub(super) fn give(&mut self, start: u64, len: u64, copier: &Arc<dyn Copier>, marks: [CopyMark; 2]) {
        self.ranges.give(start, len);
        let leaving = Leaving { start, end: start + len, copier: copier.clone(), marks };
        if !leaving.is_done() {
            self.leaving.push(leaving);
        }
    }

    /// What a copy of `copier` to a range must wait for; for others' copies the host waits here.
    pub(super) fn before_writing(&mut self, start: u64, len: u64, copier: &Arc<dyn Copier>) -> Vec<CopyMark> {
        self.leaving.retain(|leaving| !leaving.is_done());
        let mut after = Vec::new();
        for leaving in self.leaving.iter().filter(|leaving| leaving.start < start + len && start < leaving.end) {
            if Arc::ptr_eq(&leaving.copier, copier) {
                after.extend(leaving.marks);
            } else {
                leaving.marks.iter().for_each(|&mark| leaving.copier.finish(mark));
            }
        }
        after
    }
}

/// Finds room for `len` bytes that come from a device, in one of the segments or in another one: its index, and the place in it.
pub(super) fn take(segments: &mut Vec<Segment>, len: u64, device: Device) -> (usize, u64) {
    if len == 0 {
        if segments.is_empty() {
            segments.push(Segment::new(0, device));
        }
        return (0, 0);
    }
    for (index, segment) in segments.iter_mut().enumerate() {
        if let Some(start) = segment.ranges.take(len) {
            return (index, start);
        }
    }
    let have = segments.iter().map(|segment| segment.ranges.end).sum();
    let more = step(have).max(len);
    // The driver would round up, and the rest be lost.
    let more = if device == Device::Cpu { more } else { more.next_power_of_two() };
    let mut segment = Segment::new(more, device);
    let start = segment.ranges.take(len).unwrap_or_default();
    segments.push(segment);
    (segments.len() - 1, start)
}
