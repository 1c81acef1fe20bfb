//! `seq_classification_on_logits`: cross-entropy among the logits of one token per class, read at the last input.

use tch::Tensor;

use super::classify::last_input;
use super::{Head, SequenceTargets, TargetPosition};
use crate::native::cuda::upload;
use crate::units::Fault;

#[derive(Debug)]
pub struct ClassifyOnLogits {
    label_tokens: Tensor,
}

impl ClassifyOnLogits {
    /// One token id per class.
    pub fn new(label_tokens: &[u32]) -> Self {
        let ids: Vec<i64> = label_tokens.iter().map(|&t| i64::from(t)).collect();
        Self { label_tokens: Tensor::from_slice(&ids) }
    }
}

impl Head for ClassifyOnLogits {
    fn target_positions(&self, sequence: usize, targets: SequenceTargets<'_>) -> Result<Vec<TargetPosition>, Fault> {
        last_input("seq_classification_on_logits", sequence, targets)
    }

    fn choices(&self, logits_nv: &Tensor) -> Tensor {
        logits_nv.index_select(1, &upload(&self.label_tokens, logits_nv.device()))
    }
}
