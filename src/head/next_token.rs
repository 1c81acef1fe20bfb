//! `next_token`: cross-entropy of every target token.

use tch::Tensor;

use super::{Head, HeadError, Pick, SequenceTargets};

#[derive(Debug)]
pub struct NextToken;

/// HF's convention for a place without a target.
const IGNORE: i64 = -100;

impl Head for NextToken {
    fn picks(&self, sequence: usize, targets: SequenceTargets<'_>) -> Result<Vec<Pick>, HeadError> {
        let SequenceTargets::Tokens(tokens) = targets else {
            return Err(HeadError::WrongTargets { head: "next_token", expected: "`labels`", found: "`label` (a class)" });
        };
        let with_target = tokens.iter().enumerate().filter(|&(_, &t)| t != IGNORE);
        Ok(with_target.map(|(position, &target)| Pick { sequence, position, target }).collect())
    }

    fn choices(&self, logits_nv: &Tensor) -> Tensor {
        logits_nv.shallow_clone()
    }
}
