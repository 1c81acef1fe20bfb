//! Hidden states or logits, and targets, to loss: evaluated only where there are targets, its gradient made in one go.

mod classify;
mod classify_on_logits;
mod column;
mod error;
mod next_token;

use tch::Tensor;

pub use classify::Classify;
pub use classify_on_logits::ClassifyOnLogits;
pub use column::{ColumnLoss, HeadFootprint, Losses, SequenceLoss, column_loss};
pub use error::HeadError;
pub use next_token::NextToken;

/// Logits for hidden states: the model's final norm and output projection behind it.
pub trait Logits {
    /// # Shapes
    /// `hidden_ne (N, E)` in, `(N, V)` out.
    fn logits(&self, hidden_ne: &Tensor) -> Tensor;

    /// The leaves behind the logits that are trained.
    fn parameters(&self) -> &[Tensor] {
        &[]
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
pub struct Pick {
    pub sequence: usize,
    pub position: usize,
    pub target: i64,
}

/// Turns logits at picked places into losses.
pub trait Head: Send {
    /// The places of a sequence, in ascending order of position.
    fn picks(&self, sequence: usize, targets: SequenceTargets<'_>) -> Result<Vec<Pick>, HeadError>;

    /// The scores among which the target is one: all logits, or those of some tokens.
    ///
    /// # Shapes
    /// `(N, V)` in, `(N, K)` out.
    fn choices(&self, logits_nv: &Tensor) -> Tensor;
}
