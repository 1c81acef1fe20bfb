//! `next_token`: cross-entropy of every target token.

use super::{Head, SequenceTargets, TargetPosition, wrong_targets};
use crate::units::Fault;

#[derive(Debug)]
pub struct NextToken;

/// HF's convention for a place without a target.
const IGNORE: i64 = -100;

impl Head for NextToken {
    fn target_positions(&self, sequence: usize, targets: SequenceTargets<'_>) -> Result<Vec<TargetPosition>, Fault> {
        let SequenceTargets::Tokens(tokens) = targets else {
            return Err(wrong_targets("next_token", "`labels`", "`label` (a class)"));
        };
        let with_target = tokens.iter().enumerate().filter(|&(_, &t)| t != IGNORE);
        Ok(with_target
            .enumerate()
            .map(|(rank, (position, &target))| TargetPosition { sequence, position, target, rank })
            .collect())
    }
}
