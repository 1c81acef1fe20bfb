//! `seq_classification_on_logits`: cross-entropy among the logits of one token per class, read at the last input.

use tch::Tensor;

use super::{Head, HeadError, Pick, SequenceTargets};
use crate::native::cuda::upload;

/// Classification by the logits of label tokens.
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
    fn picks(&self, sequence: usize, targets: SequenceTargets<'_>) -> Result<Vec<Pick>, HeadError> {
        let SequenceTargets::Class { len, class } = targets else {
            let (expected, found) = ("`label` (a class)", "`labels`");
            return Err(HeadError::WrongTargets { head: "seq_classification_on_logits", expected, found });
        };
        Ok(vec![Pick { sequence, position: len - 1, target: class as i64 }])
    }

    fn choices(&self, logits_nv: &Tensor) -> Tensor {
        logits_nv.index_select(1, &upload(&self.label_tokens, logits_nv.device()))
    }
}
