//! What a run is started with.

use std::rc::Rc;

use tch::Device;

use super::Interrupt;
use crate::dist::ProcessGroup;

/// What a run is started with beside its recipe.
#[derive(Clone, Copy)]
pub struct Start<'a> {
    pub device: Device,
    /// What ends it before its time.
    pub interrupt: &'a Interrupt,
    pub world: &'a Rc<ProcessGroup>,
    /// Whether its memory is told by part.
    pub profiles_memory: bool,
}
