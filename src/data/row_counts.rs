//! What the rows of a survey came to, and whether a run would start with them.

use std::collections::HashSet;

use super::bad_rows::{BadRows, ErrorScope};
use super::faults;
use super::source::DataSource;
use super::surveyed_row::{SampleFate, SurveyedRow};
use crate::recipe::OnBadRow;
use crate::units::Fault;

/// Every row is in exactly one of `bad`, `too_long`, `dropped`, `uncuttable`, `cut`, `split` and `whole`.
#[derive(Debug)]
pub struct RowCounts {
    /// Rows that are no samples.
    bad: BadRows,
    /// What stops a run as too long: how many, and the first.
    too_long: (usize, Option<Fault>),
    /// Samples left out as too long.
    pub dropped: usize,
    /// Samples left out as too long of which nothing may be cut.
    pub uncuttable: usize,
    /// Samples that are used, but for a part.
    pub cut: usize,
    /// Samples that are used in windows.
    pub split: usize,
    pub windows: usize,
    /// Samples that are used whole.
    pub whole: usize,
    /// Samples with the same tokens as an earlier one, used or not.
    pub duplicates: usize,
    pub tokens: usize,
    pub trained: usize,
    /// Tokens that are cut out.
    pub cut_tokens: usize,
    /// Samples by the power of two that is not below their length.
    pub lengths: Vec<usize>,
    /// Tokens of the longest sample.
    pub longest: usize,
    shortest: usize,
    /// Tokens that a sample may have.
    limit: usize,
    seen: HashSet<u64>,
}

impl RowCounts {
    pub(super) fn new(on_bad_row: OnBadRow, limit: usize) -> Self {
        Self {
            bad: BadRows::new(on_bad_row),
            too_long: (0, None),
            dropped: 0,
            uncuttable: 0,
            cut: 0,
            split: 0,
            windows: 0,
            whole: 0,
            duplicates: 0,
            tokens: 0,
            trained: 0,
            cut_tokens: 0,
            lengths: Vec::new(),
            longest: 0,
            shortest: usize::MAX,
            limit,
            seen: HashSet::new(),
        }
    }

    /// Counts a row; fails where it says that no row can be encoded, unless `goes_on`.
    pub(super) fn take(&mut self, row: SurveyedRow, goes_on: bool) -> Result<(), Fault> {
        let sample = match row.sample {
            Ok(sample) => sample,
            Err(error) if ErrorScope::of(&error) == ErrorScope::Length => {
                self.bad.good();
                self.too_long.0 += 1;
                self.too_long.1.get_or_insert(error);
                return Ok(());
            }
            Err(error) if ErrorScope::of(&error) == ErrorScope::All && !goes_on => return Err(error),
            Err(error) => {
                self.bad.note(error);
                return Ok(());
            }
        };
        self.bad.good();
        self.duplicates += usize::from(!self.seen.insert(sample.fingerprint));
        self.longest = self.longest.max(sample.length);
        self.shortest = self.shortest.min(sample.length);
        let power = sample.length.next_power_of_two().ilog2() as usize;
        self.lengths.resize(self.lengths.len().max(power + 1), 0);
        self.lengths[power] += 1;
        match sample.fate {
            SampleFate::Dropped => self.dropped += 1,
            SampleFate::NothingToCut => self.uncuttable += 1,
            SampleFate::Cut(tokens) => {
                self.cut += 1;
                self.cut_tokens += tokens;
            }
            SampleFate::Split(windows) => {
                self.split += 1;
                self.windows += windows;
            }
            SampleFate::Whole => self.whole += 1,
        }
        if sample.fate.is_used() {
            self.tokens += sample.ids.len();
            self.trained += sample.num_trained();
        }
        Ok(())
    }

    /// Rows that were looked at.
    pub fn rows(&self) -> usize {
        self.bad.counts().0
    }

    /// Rows that are no samples.
    pub fn bad(&self) -> usize {
        self.bad.counts().1
    }

    /// Samples that stop a run as too long.
    pub fn too_long(&self) -> usize {
        self.too_long.0
    }

    /// Samples of which something is used.
    pub fn used(&self) -> usize {
        self.whole + self.cut + self.split
    }

    /// What a run would leave out without stopping, if there is any.
    ///
    /// # Errors
    /// It would not start: what it would say.
    pub fn verdict(self, source: &DataSource) -> Result<Option<Fault>, Fault> {
        let (used, (read, bad), path) = (self.used(), self.bad.counts(), source.files.first().cloned().unwrap_or_default());
        let left_out = self.bad.finish(&path)?;
        if let (_, Some(error)) = self.too_long {
            return Err(error);
        }
        if used == 0 {
            return Err(faults::nothing_fits(&path, read - bad, self.limit, self.shortest));
        }
        Ok(left_out)
    }
}
