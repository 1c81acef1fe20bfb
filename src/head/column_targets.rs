//! Where losses are due, and what a teacher predicts there.

use tch::Tensor;

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
    pub(super) fn rows(&self, start: usize, count: usize) -> Self {
        let rows = |x: &Tensor| x.narrow(0, start as i64, count as i64);
        Self { token_nk: rows(&self.token_nk), log_prob_nk: rows(&self.log_prob_nk) }
    }
}
