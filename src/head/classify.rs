//! `seq_classification` and `seq_classification_on_logits`: cross-entropy at the last input, among the scores of the model's classes or among the
//! logits of one token per class.

use tch::Tensor;

use super::{Head, SequenceTargets, TargetPosition, wrong_targets};
use crate::native::cuda::upload;
use crate::units::Fault;

#[derive(Debug)]
pub struct Classify {
    /// Ids of the tokens of the classes; `None` where the model scores the classes themselves.
    label_tokens: Option<Tensor>,
}

impl Classify {
    /// For a model that scores the classes.
    pub fn on_scores() -> Self {
        Self { label_tokens: None }
    }

    /// One token id per class.
    pub fn on_logits(label_tokens: &[u32]) -> Self {
        let ids: Vec<i64> = label_tokens.iter().map(|&t| i64::from(t)).collect();
        Self { label_tokens: Some(Tensor::from_slice(&ids)) }
    }
}

impl Head for Classify {
    fn target_positions(&self, sequence: usize, targets: SequenceTargets<'_>) -> Result<Vec<TargetPosition>, Fault> {
        let SequenceTargets::Class { len, class } = targets else {
            let on_logits = if self.label_tokens.is_some() { "_on_logits" } else { "" };
            return Err(wrong_targets(&format!("seq_classification{on_logits}"), "`label` (a class)", "`labels`"));
        };
        Ok(vec![TargetPosition { sequence, position: len - 1, target: class as i64, rank: 0 }])
    }

    fn choices(&self, logits_nv: &Tensor) -> Tensor {
        let of_labels = |ids: &Tensor| logits_nv.index_select(1, &upload(ids, logits_nv.device()));
        self.label_tokens.as_ref().map_or_else(|| logits_nv.shallow_clone(), of_labels)
    }
}
