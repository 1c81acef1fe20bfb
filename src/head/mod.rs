//! Hidden states or logits, and targets, to loss: evaluated only where there are targets, its gradient made in one go.

mod classify_on_logits;
mod column;
mod next_token;

use tch::Tensor;

pub use classify_on_logits::ClassifyOnLogits;
pub use column::{ColumnLoss, Losses, SequenceLoss, column_loss, places_of_block};
pub use next_token::NextToken;

use crate::units::Hint;

/// What can go wrong in a head.
#[derive(Debug, thiserror::Error)]
pub enum HeadError {
    /// The batch brings another kind of target.
    #[error("the head `{head}` needs {expected}, the data has {found}")]
    WrongTargets {
        /// Recipe name of the head.
        head: &'static str,
        /// `labels`, say.
        expected: &'static str,
        /// `class indices`, say.
        found: &'static str,
    },
    /// Autograd through the head failed.
    #[error(transparent)]
    Backward(#[from] crate::native::BackwardError),
    /// Losses could not be read.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}

impl Hint for HeadError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::WrongTargets { .. } => Some("choose the `head.kind` that fits the data".into()),
            Self::Backward(_) | Self::Torch(_) => None,
        }
    }
}

/// Logits for hidden states: the model's final norm and output projection behind it.
pub trait Logits {
    /// # Shapes
    /// `hidden_ne (N, E)` in, `(N, V)` out.
    fn logits(&self, hidden_ne: &Tensor) -> Tensor;

    /// The leaves behind the logits that are trained; of a model with an adapter there are none.
    fn parameters(&self) -> &[Tensor] {
        &[]
    }
}

/// The targets of one sequence.
#[derive(Clone, Copy, Debug)]
pub enum SequenceTargets<'a> {
    /// What each input must predict; −100 where there is nothing to learn.
    Tokens(&'a [i64]),
    /// The class to be read at the last of `len` inputs.
    Class {
        /// Number of inputs.
        len: usize,
        /// Index of the class.
        class: usize,
    },
}

/// One place where a loss is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pick {
    /// Sequence of the batch.
    pub sequence: usize,
    /// Position in the sequence.
    pub position: usize,
    /// Target token or class.
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
