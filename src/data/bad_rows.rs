//! Rows that cannot be read, or are no samples: counted, and the first of them kept to be told.

use std::path::Path;

use super::faults::{self, LEAVE_OUT};
use crate::recipe::OnBadRow;
use crate::units::Fault;

const TOLD: usize = 10;

#[derive(Debug, Default)]
pub(super) struct BadRows {
    are_dropped: bool,
    first: Vec<Fault>,
    pub(super) count: usize,
    pub(super) read: usize,
}

impl BadRows {
    pub(super) fn new(on_bad_row: OnBadRow) -> Self {
        Self { are_dropped: on_bad_row == OnBadRow::Drop, ..Self::default() }
    }

    pub(super) fn note(&mut self, error: Fault) {
        self.read += 1;
        self.count += 1;
        if self.first.len() < TOLD {
            self.first.push(error);
        }
    }

    /// What the recipe leaves out, where there is any; fails where it does not leave bad rows out, or there are no others.
    pub(super) fn finish(mut self, path: &Path) -> Result<Option<Fault>, Fault> {
        let has_samples = self.count < self.read;
        let error = match self.count {
            0 if has_samples => return Ok(None),
            0 => return Err(faults::empty(path)),
            1 => self.first.remove(0),
            count => several(&self.first, count, self.read),
        };
        if self.are_dropped && has_samples { Ok(Some(error)) } else { Err(error) }
    }
}

/// So many bad rows of those that were read, of which the first are told, a line each.
fn several(first: &[Fault], count: usize, read: usize) -> Fault {
    let lines = first.iter().map(|error| format!("\n  {error}")).collect::<Vec<_>>().concat();
    let lines = if count > first.len() { format!("; the first {} are{lines}", first.len()) } else { format!(":{lines}") };
    let message = format!("{count} of {read} rows of the data files cannot be read{lines}");
    // Where none can be read, something is wrong with all of them.
    let shared = first.first().filter(|_| count == read).and_then(Fault::hint);
    Fault::data(message, shared.unwrap_or_else(|| LEAVE_OUT.to_owned()))
}
