//! The heads by the names of recipes: where each has its targets, among which scores, and with which loss.

use tch::Tensor;

use super::{BlockLoss, SequenceTargets, SoftRows, TargetPosition, loss};
use crate::native::cuda::upload;
use crate::units::Fault;

/// Turns logits at target positions into losses.
#[derive(Debug)]
pub enum Head {
    /// `next_token`: cross-entropy of every target token.
    NextToken,
    /// `head.distill`: the next token, with the loss `(1 − weight) · CE + weight · T² · KL(teacher ‖ model)` where a batch brings a teacher's
    /// predictions, and CE where it brings none.
    ///
    /// KL is that of k + 1 outcomes: each of the teacher's k likeliest tokens, and all others together. Both distributions are at temperature T.
    Distilled {
        weight: f64,
        /// What scores are divided by, T.
        temperature: f64,
    },
    /// `seq_classification`: cross-entropy at the last input, among the scores of the model's classes.
    ClassScores,
    /// `seq_classification_on_logits`: the same among the logits of one token per class, with these ids.
    ClassLogits(Tensor),
}

/// HF's convention for a place without a target.
const IGNORE: i64 = -100;

impl Head {
    /// Classes by their tokens, one id per class.
    pub fn on_logits(label_tokens: &[u32]) -> Self {
        let ids: Vec<i64> = label_tokens.iter().map(|&t| i64::from(t)).collect();
        Self::ClassLogits(Tensor::from_slice(&ids))
    }

    /// The places of a sequence, in ascending order of position.
    pub fn target_positions(&self, sequence: usize, targets: SequenceTargets<'_>) -> Result<Vec<TargetPosition>, Fault> {
        let is_of_tokens = matches!(self, Self::NextToken | Self::Distilled { .. });
        match targets {
            SequenceTargets::Tokens(tokens) if is_of_tokens => {
                let with_target = tokens.iter().enumerate().filter(|&(_, &t)| t != IGNORE).enumerate();
                let position = |(rank, (position, &target))| TargetPosition { sequence, position, target, rank };
                Ok(with_target.map(position).collect())
            }
            SequenceTargets::Class { len, class } if !is_of_tokens => {
                Ok(vec![TargetPosition { sequence, position: len - 1, target: class as i64, rank: 0 }])
            }
            SequenceTargets::Tokens(_) => Err(self.wrong_targets("`label` (a class)", "`labels`")),
            SequenceTargets::Class { .. } => Err(self.wrong_targets("`labels`", "`label` (a class)")),
        }
    }

    /// The batch brings another kind of target than the head needs.
    fn wrong_targets(&self, expected: &str, found: &str) -> Fault {
        let head = match self {
            Self::NextToken | Self::Distilled { .. } => "next_token",
            Self::ClassScores => "seq_classification",
            Self::ClassLogits(_) => "seq_classification_on_logits",
        };
        let message = format!("the head `{head}` needs {expected}, the data has {found}");
        Fault::data(message, "choose the `head.kind` that fits the data")
    }

    /// The scores `(N, K)` among which the target is one: all logits `(N, V)`, or those of some tokens.
    pub fn choices(&self, logits_nv: &Tensor) -> Tensor {
        match self {
            Self::ClassLogits(ids) => logits_nv.index_select(1, &upload(ids, logits_nv.device())),
            _ => logits_nv.shallow_clone(),
        }
    }

    /// Losses of places that have a target, and their gradient: cross-entropy, unless a teacher's predictions play a part. Targets are i64.
    pub fn losses(&self, scores_nk: &Tensor, target_n: &Tensor, soft: Option<&SoftRows>, weight: Option<f64>) -> BlockLoss {
        match (self, soft) {
            (Self::Distilled { weight: share, temperature }, Some(soft)) => {
                loss::distilled(scores_nk, target_n, soft, *share, *temperature, weight)
            }
            _ => loss::cross_entropy(scores_nk, target_n, weight),
        }
    }
}
