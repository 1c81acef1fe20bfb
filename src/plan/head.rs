//! What the head takes for a moment: logits in blocks, and the gradients behind them.

use super::Subject;
use crate::head::places_of_block;

/// Bytes of a column's loss and gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HeadBytes {
    /// The most at a time, the gradient of the hidden states with it.
    pub(super) inside: u64,
}

impl HeadBytes {
    /// Of so many targets in a column whose hidden states take `hidden` bytes.
    pub(super) fn of(s: &Subject<'_>, targets: usize, hidden: u64) -> Self {
        if targets == 0 {
            return Self::default();
        }
        let (vocab, e) = (s.config.vocab_size as u64, s.hidden());
        let places = targets.min(places_of_block(s.config.vocab_size)) as u64;
        // Logits, their powers, and in a narrow model one of them in its own kind too.
        let scores = vocab * (2 * s.wide() + if s.is_narrow() { s.element() } else { 0 });
        let states = e * (4 * s.element() + 2 * s.wide());
        // Of final norm and output projection: the sum, and a block's part.
        let trained = if s.trains_weights() { 2 * (vocab * e + e) * s.element() } else { 0 };
        Self { inside: hidden + places * (scores + states) + trained }
    }
}
