//! What an engine is made of, as its phases take it.

use super::{Settings, Stores};
use crate::cache::ReplayLog;
use crate::head::Head;

/// The parts of an engine.
pub(super) struct Setup {
    pub(super) settings: Settings,
    pub(super) head: Box<dyn Head>,
    pub(super) stores: Stores,
    /// What the forward phase follows instead of choosing.
    pub(super) log: Option<ReplayLog>,
}
