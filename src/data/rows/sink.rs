//! Whom rows are handed to, and how they are read.

use std::collections::BTreeMap;

use super::row::DataRow;
use crate::units::Fault;

/// Rows are handed to it: sound ones, and what is wrong with those that are not. Its own errors end the walk.
pub(in crate::data) type Sink<'a, E> = &'a mut dyn FnMut(Result<DataRow, Fault>) -> Result<(), E>;

/// Why a sink ends a walk before the last row.
pub(in crate::data) enum WalkEnd {
    /// Nobody asks for any further rows.
    Enough,
    Failed(Fault),
}

impl From<Fault> for WalkEnd {
    fn from(error: Fault) -> Self {
        Self::Failed(error)
    }
}

#[derive(Clone, Debug)]
pub(in crate::data) struct RowSettings {
    /// Bytes of the longest line, or of the longest record of another text file.
    pub(in crate::data) max_line_bytes: usize,
    /// Fields of a format by the columns that hold them.
    pub(in crate::data) columns: BTreeMap<String, String>,
}

impl Default for RowSettings {
    fn default() -> Self {
        Self { max_line_bytes: 64 << 20, columns: BTreeMap::new() }
    }
}
