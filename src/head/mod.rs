//! Hidden states or logits, and targets, to loss: evaluated only where there are targets, its gradient made in one go.

mod classify;
mod column;
mod column_targets;
mod distilled;
mod loss;
mod next_token;

use tch::Tensor;

use crate::native::BackwardError;
use crate::units::Fault;

pub use classify::Classify;
pub use column::{ColumnLoss, HeadFootprint, Losses, SequenceLoss, column_loss};
pub use column_targets::{ColumnTargets, SoftRows, TargetPosition};
pub use distilled::Distilled;
pub use loss::BlockLoss;
pub use next_token::NextToken;

/// Logits for hidden states: the model's final norm and output projection behind it.
pub trait Logits {
    /// # Shapes
    /// `hidden_ne (N, E)` in, `(N, V)` out.
    fn of_hidden(&self, hidden_ne: &Tensor) -> Tensor;

    /// The trained parameters that the logits depend on.
    fn trained(&self) -> Vec<Tensor> {
        Vec::new()
    }

    /// Logits of a place, V.
    fn num_scores(&self) -> usize;
}

#[derive(Clone, Copy, Debug)]
pub enum SequenceTargets<'a> {
    /// What each input must predict; −100 where there is nothing to learn.
    Tokens(&'a [i64]),
    /// The class to be read at the last of `len` inputs.
    Class { len: usize, class: usize },
}

impl From<BackwardError> for Fault {
    fn from(error: BackwardError) -> Self {
        Self::failed(error.to_string()).carrying(error)
    }
}

impl From<tch::TchError> for Fault {
    fn from(error: tch::TchError) -> Self {
        Self::failed(format!("libtorch: {error}"))
    }
}

/// The batch brings another kind of target than the head of this recipe name needs.
fn wrong_targets(head: &str, expected: &str, found: &str) -> Fault {
    let message = format!("the head `{head}` needs {expected}, the data has {found}");
    Fault::data(message, "choose the `head.kind` that fits the data")
}

/// Turns logits at target positions into losses.
pub trait Head: Send {
    /// The places of a sequence, in ascending order of position.
    fn target_positions(&self, sequence: usize, targets: SequenceTargets<'_>) -> Result<Vec<TargetPosition>, Fault>;

    /// The scores among which the target is one: all logits, or those of some tokens.
    ///
    /// # Shapes
    /// `(N, V)` in, `(N, K)` out.
    fn choices(&self, logits_nv: &Tensor) -> Tensor {
        logits_nv.shallow_clone()
    }

    /// Losses of places that have a target, and their gradient: cross-entropy, unless a teacher's predictions play a part.
    ///
    /// # Shapes
    /// `scores_nk (N, K)`, `target_n (N)`, i64.
    fn losses(&self, scores_nk: &Tensor, target_n: &Tensor, soft: Option<&SoftRows>, weight: Option<f64>) -> BlockLoss {
        let _ = soft;
        loss::cross_entropy(scores_nk, target_n, weight)
    }
}
