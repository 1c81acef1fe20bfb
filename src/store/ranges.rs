//! Which parts of a segment of memory or of a file are free: taken from the front, given back in any order.

use std::collections::BTreeMap;

/// What is handed out begins at a multiple of this: every element type may lie there, and vector loads are aligned.
pub(super) const ALIGNMENT: u64 = 64;

/// `length`, rounded up to whole steps of [`ALIGNMENT`].
pub(super) fn aligned(length: u64) -> u64 {
    length.next_multiple_of(ALIGNMENT)
}

/// The free ranges of `0..end`.
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
