//! Hidden states or logits, and targets, to loss: evaluated only where there are targets, its gradient made in one go.

mod column;
mod column_targets;
mod distilled;
mod kinds;
mod loss;

use tch::Tensor;

use crate::native::BackwardError;
use crate::units::Fault;

pub use column::{HeadFootprint, Losses, SequenceLoss, column_loss};
pub use column_targets::{ColumnTargets, SoftRows, TargetPosition};
pub use kinds::Head;
pub use loss::BlockLoss;

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
