//! `seq_classification`: cross-entropy among the scores of classes at the last input.

use super::{Head, SequenceTargets, TargetPosition, wrong_targets};
use crate::units::Fault;

#[derive(Debug)]
pub struct Classify;

/// The last input, where the data has a class.
pub(super) fn last_input(
    head: &'static str,
    sequence: usize,
    targets: SequenceTargets<'_>,
) -> Result<Vec<TargetPosition>, Fault> {
    let SequenceTargets::Class { len, class } = targets else {
        return Err(wrong_targets(head, "`label` (a class)", "`labels`"));
    };
    Ok(vec![TargetPosition { sequence, position: len - 1, target: class as i64, rank: 0 }])
}

impl Head for Classify {
    fn target_positions(&self, sequence: usize, targets: SequenceTargets<'_>) -> Result<Vec<TargetPosition>, Fault> {
        last_input("seq_classification", sequence, targets)
    }
}
