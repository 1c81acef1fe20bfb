//! Segments of the host's memory, which parts of them are free, and what is still on its way to and from them: a range that was given back
//! is not written again before the copies from it are done.

use std::collections::BTreeMap;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::copier::{Copier, CopyMark};
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

/// What is handed out begins at a multiple of this: every element type may lie there, and vector loads are aligned.
const ALIGNMENT: u64 = 64;

/// `length`, rounded up to whole steps of [`ALIGNMENT`].
pub(super) fn aligned(length: u64) -> u64 {
    length.next_multiple_of(ALIGNMENT)
}

/// The free ranges within `0..end` of a segment or a file: taken from the front, given back in any order.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    /// Length by start; no two of them touch.
    free: BTreeMap<u64, u64>,
    pub(super) end: u64,
    /// The highest end of what has ever been taken.
    pub(super) touched: u64,
}

impl Ranges {
    /// Makes the segment longer by a free part.
    pub(super) fn grow(&mut self, more: u64) {
        let start = self.end;
        self.end += more;
        self.give(start, more);
    }

    /// How much is missing at the end for `length` to fit: the last free part counts.
    pub(super) fn missing(&self, length: u64) -> u64 {
        let last = self.free.last_key_value().filter(|(start, len)| **start + **len == self.end);
        length - last.map_or(0, |(_, len)| *len).min(length)
    }

    /// The lowest place where `length` fits, so that what is in use stays together at the front.
    pub(super) fn take(&mut self, length: u64) -> Option<u64> {
        let (&start, &free) = self.free.iter().find(|(_, free)| **free >= length)?;
        self.free.remove(&start);
        if free > length {
            self.free.insert(start + length, free - length);
        }
        self.touched = self.touched.max(start + length);
        Some(start)
    }

    /// Gives a part back, which joins its free neighbours.
    pub(super) fn give(&mut self, start: u64, length: u64) {
        let (mut start, mut length) = (start, length);
        if let Some((&before, &len)) = self.free.range(..start).next_back()
            && before + len == start
        {
            (start, length) = (before, len + length);
        }
        if let Some(behind) = self.free.remove(&(start + length)) {
            length += behind;
        }
        self.free.insert(start, length);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        /// Against a plain list of which step is taken by whom.
        #[test]
        fn no_two_parts_overlap_and_all_comes_back(actions in prop::collection::vec((1u64..9, any::<bool>(), 0usize..8), 1..80)) {
            let mut ranges = Ranges::default();
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (length, gives, which) in actions {
                if gives && !held.is_empty() {
                    let (start, length) = held.swap_remove(which % held.len());
                    ranges.give(start, length);
                    continue;
                }
                let start = ranges.take(length).unwrap_or_else(|| {
                    ranges.grow(ranges.missing(length));
                    ranges.take(length).unwrap()
                });
                prop_assert!(start + length <= ranges.end);
                for &(other, len) in &held {
                    prop_assert!(start + length <= other || other + len <= start, "{start}+{length} over {other}+{len}");
                }
                held.push((start, length));
            }
            for (start, length) in held {
                ranges.give(start, length);
            }
            prop_assert_eq!(ranges.free, BTreeMap::from([(0, ranges.end)]));
        }
    }

    #[test]
    fn what_was_given_back_is_taken_again_before_there_is_more() {
        let mut ranges = Ranges::default();
        ranges.grow(100);
        let parts: Vec<u64> = (0..10).map(|_| ranges.take(10).unwrap()).collect();
        assert_eq!((ranges.take(1), ranges.missing(30)), (None, 30));
        for start in [20, 40, 30] {
            ranges.give(parts[start / 10], 10);
        }
        assert_eq!((ranges.take(25), ranges.take(5), ranges.take(1)), (Some(20), Some(45), None));
        ranges.give(90, 10);
        assert_eq!((ranges.missing(30), ranges.touched), (20, 100));
        ranges.grow(50);
        assert_eq!((ranges.end, ranges.touched), (150, 100));
    }
}
