//! What the head takes for a moment: logits in blocks, and the gradients behind them.

use super::StepSpec;
use crate::head::places_of_block;

/// The most bytes at a time for so many targets in a column whose hidden states take `hidden` bytes, their gradient with them.
pub(super) fn inside(s: &StepSpec<'_>, targets: usize, hidden: u64) -> u64 {
    if targets == 0 {
        return 0;
    }
    let (choices, e, output) = (s.config.num_scores() as u64, s.hidden(), s.output_numbers());
    let places = targets.min(places_of_block(s.config.num_scores(), s.device)) as u64;
    // Logits, their gradient or powers, and in a narrow model one of them in its own kind too; for the weight's gradient they are laid out anew.
    let scores = choices * (2 * s.wide() + if s.is_narrow() || output > 0 { s.element() } else { 0 });
    // Hidden states of the places, and the gradients of their norm and of themselves.
    let states = 3 * e * s.element();
    // Of final norm and output projection: the sum, and a block's part. An adapter's own matrix is wide, and computes as a narrow one.
    let narrow = if s.is_narrow() && !s.trains_weights() { 2 * s.element() } else { 0 };
    let trained = output * (2 * s.wide() + narrow);
    hidden + places * (scores + states) + trained
}
