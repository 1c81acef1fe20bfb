//! Rows of a survey, what they came to, and whether a run would start with them.

use std::collections::HashSet;

use super::bad_rows::{BadRows, ErrorScope};
use super::encoded_rows::SampleRow;
use super::faults;
use super::on_too_long::{LengthCounts, LengthOutcome};
use super::source::DataSource;
use crate::recipe::OnBadRow;
use crate::units::Fault;

pub type SurveyedRow = SampleRow<SurveyedSample>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SurveyedSample {
    /// What was tokenised; `None` of samples that are token ids already.
    pub text: Option<String>,
    /// The tokens, without those that are cut out.
    pub ids: Vec<u32>,
    pub is_trained: Vec<bool>,
    /// The class, where the head has classes: the only target.
    pub class: Option<usize>,
    /// How many tokens it had before anything was cut.
    pub length: usize,
    pub outcome: LengthOutcome,
    /// A hash of its tokens before anything was cut: tells samples apart.
    pub(super) fingerprint: u64,
}

impl SurveyedSample {
    pub fn num_trained(&self) -> usize {
        self.is_trained.iter().filter(|&&trained| trained).count()
    }
}

/// Every row is bad, too long, or one of the samples.
#[derive(Debug)]
pub struct RowCounts {
    /// Rows that are no samples.
    bad: BadRows,
    /// Samples that stop a run as too long.
    pub too_long: usize,
    first_too_long: Option<Fault>,
    /// The others, by what becomes of them.
    pub samples: LengthCounts,
    /// Samples with the same tokens as an earlier one, used or not.
    pub duplicates: usize,
    pub tokens: usize,
    pub trained: usize,
    /// Samples by the power of two that is not below their length.
    pub lengths: Vec<usize>,
    /// Tokens that a sample may have.
    limit: usize,
    seen: HashSet<u64>,
}

impl RowCounts {
    pub(super) fn new(on_bad_row: OnBadRow, limit: usize) -> Self {
        Self {
            bad: BadRows::new(on_bad_row),
            too_long: 0,
            first_too_long: None,
            samples: LengthCounts::default(),
            duplicates: 0,
            tokens: 0,
            trained: 0,
            lengths: Vec::new(),
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
                self.too_long += 1;
                self.first_too_long.get_or_insert(error);
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
        self.samples.add(sample.length, &sample.outcome);
        count_length(&mut self.lengths, sample.length);
        if sample.outcome.is_used() {
            self.tokens += sample.ids.len();
            self.trained += sample.num_trained();
        }
        Ok(())
    }

    pub fn rows(&self) -> usize {
        self.bad.counts().0
    }

    /// Rows that are no samples.
    pub fn bad(&self) -> usize {
        self.bad.counts().1
    }

    /// What a run would leave out without stopping, if there is any.
    ///
    /// # Errors
    /// It would not start: what it would say.
    pub fn verdict(self, source: &DataSource) -> Result<Option<Fault>, Fault> {
        let (used, (read, bad), path) =
            (self.samples.used(), self.bad.counts(), source.files.first().cloned().unwrap_or_default());
        let left_out = self.bad.finish(&path)?;
        if let Some(error) = self.first_too_long {
            return Err(error);
        }
        if used == 0 {
            return Err(faults::nothing_fits(&path, read - bad, self.limit, self.samples.shortest.unwrap_or(0)));
        }
        Ok(left_out)
    }
}

/// Counts a length by the power of two that is not below it.
pub(super) fn count_length(counts: &mut Vec<usize>, length: usize) {
    let power = length.max(1).next_power_of_two().ilog2() as usize;
    counts.resize(counts.len().max(power + 1), 0);
    counts[power] += 1;
}
