//! The engine, as its phases take it.

use super::{Settings, Stores};
use crate::cache::ReplayLog;
use crate::head::Head;

/// Runs batches through one model's shape, cache and head.
pub struct Engine {
    pub(super) settings: Settings,
    pub(super) head: Head,
    pub(super) stores: Stores,
    /// What the forward phase follows instead of choosing.
    pub(super) log: Option<ReplayLog>,
}
