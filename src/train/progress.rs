//! How far a run has come, as its checkpoints say.

use super::skipped::SkippedSteps;
use crate::checkpoint::Best;

#[derive(Default)]
pub(super) struct RunProgress {
    /// Steps that are made or left out.
    pub(super) step: u64,
    pub(super) total_tokens: u64,
    pub(super) best: Option<Best>,
    pub(super) skipped: SkippedSteps,
    /// Whether the validation after the last step was given up.
    pub(super) owes_validation: bool,
    /// Lines of metrics that an earlier version wrote; `None` while nobody has counted them.
    pub(super) unchecked_metrics: Option<u64>,
}
