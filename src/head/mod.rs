//! Hidden states or logits, and targets, to loss: evaluated only where there are targets, its gradient made in one go.

mod column;
mod kinds;
mod loss;

use tch::Tensor;

use crate::native::BackwardError;
use crate::units::Fault;

pub use column::{HeadFootprint, Losses, SequenceLoss, column_loss};
pub use kinds::Head;
pub use loss::BlockLoss;

/// Logits for hidden states: the model's final norm and output projection behind it.
pub trait Logits {
    /// `(N, E)` in, `(N, V)` out.
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

/// One place where a loss is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetPosition {
    pub sequence: usize,
    pub position: usize,
    pub target: i64,
    /// Which of the targets of its sequence it is.
    pub rank: usize,
}

/// The target positions of a column, in ascending order of position.
#[derive(Clone, Copy, Debug)]
pub struct ColumnTargets<'a> {
    /// The position of the column's first token.
    pub start: usize,
    pub target_positions: &'a [TargetPosition],
    /// A further factor on the gradient of each loss: one over the targets of its sequence.
    pub sequence_weights: Option<&'a [f64]>,
    /// What a teacher predicts at each of them.
    pub soft: Option<&'a SoftRows>,
}

/// A teacher's likeliest tokens in some places: a row for each.
#[derive(Debug)]
pub struct SoftRows {
    /// Token ids `(N, k)`, i64.
    pub token_nk: Tensor,
    /// Logarithms of their probabilities among all tokens `(N, k)`.
    pub log_prob_nk: Tensor,
}

impl SoftRows {
    fn rows(&self, start: usize, count: usize) -> Self {
        let rows = |x: &Tensor| x.narrow(0, start as i64, count as i64);
        Self { token_nk: rows(&self.token_nk), log_prob_nk: rows(&self.log_prob_nk) }
    }
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
