//! What becomes of a sample by its length, and how many of each there are.

use std::ops::Range;

use super::faults::RowFault;
use super::sample_place::SamplePlace;
use crate::recipe::{DataRecipe, OnTooLong};
use crate::units::Fault;

/// Tokens of a sample, before anything is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Length {
    pub(super) total: usize,
    /// The leading ones that may be cut.
    pub(super) prompt: usize,
    /// All of them are targets, but perhaps the first, which nothing predicts.
    pub(super) is_plain_text: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LengthOutcome {
    Whole,
    /// This part of the prompt is cut out.
    Cut(Range<usize>),
    /// It is used in these windows, each with how many of its first tokens are context only.
    Split(Vec<(Range<usize>, usize)>),
    /// It is left out because the recipe says so.
    Dropped,
    /// It is left out because what may not be cut is too long already.
    NothingToCut,
}

/// Refuses windows of so many tokens that would share so much that none goes on.
pub(super) fn check_windows(recipe: &DataRecipe, limit: usize) -> Result<(), Fault> {
    let overlap = recipe.split_overlap;
    if recipe.on_too_long != OnTooLong::Split || overlap.saturating_add(2) <= limit {
        return Ok(());
    }
    let most = limit.saturating_sub(2);
    let message = format!("windows of {limit} tokens cannot share {overlap}: expected at most {most}");
    Err(Fault::data(message, "lower `data.split_overlap`, or raise `data.max_seq_length`"))
}

impl LengthOutcome {
    pub fn is_used(&self) -> bool {
        matches!(self, Self::Whole | Self::Cut(_) | Self::Split(_))
    }

    /// What becomes of a sample by what the recipe says of those of more than `limit` tokens.
    pub(super) fn of(
        recipe: &DataRecipe,
        limit: usize,
        length: Length,
        place: impl FnOnce() -> Result<SamplePlace, Fault>,
    ) -> Result<Self, Fault> {
        let total = length.total;
        if total <= limit {
            return Ok(Self::Whole);
        }
        match recipe.on_too_long {
            OnTooLong::Split if length.is_plain_text => Ok(Self::Split(windows(total, limit, recipe.split_overlap).collect())),
            OnTooLong::Split => {
                let hint = "set `data.on_too_long` to \"drop\" or \"truncate\", or raise `data.max_seq_length`";
                let place = place()?;
                let expected = format!("at most {limit}, or a text all of whose tokens are targets, which can be split");
                let message = format!("{place}: {total} tokens, expected {expected}");
                Err(RowFault::too_long(place, message, hint))
            }
            OnTooLong::Drop => Ok(Self::Dropped),
            OnTooLong::Error => {
                let place = place()?;
                let message = format!("{place}: {total} tokens, expected at most {limit}");
                let hint = "set `data.on_too_long` to \"drop\" or \"truncate\", raise `data.max_seq_length` as far as the model's \
                            positions allow, or have more positions with `model.rope_scaling`";
                Err(RowFault::too_long(place, message, hint))
            }
            OnTooLong::Truncate => {
                let kept = limit.saturating_sub(total - length.prompt);
                if kept == 0 {
                    return Ok(Self::NothingToCut);
                }
                // Example: 10 of 14 prompt tokens stay: 5 at the front and 5 at the back, 5..9 goes.
                Ok(Self::Cut(kept.div_ceil(2)..length.prompt - kept / 2))
            }
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LengthCounts {
    pub whole: usize,
    /// Samples that are used, but for a part of their prompts.
    pub cut: usize,
    pub cut_tokens: usize,
    pub split: usize,
    pub windows: usize,
    /// Samples left out as too long.
    pub dropped: usize,
    /// Samples left out as too long of which nothing may be cut.
    pub uncuttable: usize,
    /// Tokens of the longest sample, before any cut.
    pub longest: usize,
    pub(super) shortest: Option<usize>,
}

impl LengthCounts {
    pub(super) fn add(&mut self, total: usize, outcome: &LengthOutcome) {
        self.longest = self.longest.max(total);
        self.shortest = Some(self.shortest.map_or(total, |shortest| shortest.min(total)));
        match outcome {
            LengthOutcome::Whole => self.whole += 1,
            LengthOutcome::Cut(range) => {
                self.cut += 1;
                self.cut_tokens += range.len();
            }
            LengthOutcome::Split(windows) => {
                self.split += 1;
                self.windows += windows.len();
            }
            LengthOutcome::Dropped => self.dropped += 1,
            LengthOutcome::NothingToCut => self.uncuttable += 1,
        }
    }

    /// Samples of which something is used.
    pub fn used(&self) -> usize {
        self.whole + self.cut + self.split
    }

    /// Samples of which nothing is used.
    pub fn left_out(&self) -> usize {
        self.dropped + self.uncuttable
    }
}

/// The windows of a text of `total` tokens, each of at most `limit`, with how many of its first ones are context only: `overlap`, which the model
/// has run before, and one that predicts the next. Each token is a target in one window. `limit` must be above `overlap` + 1, and `total` above 0.
pub(super) fn windows(total: usize, limit: usize, overlap: usize) -> impl Iterator<Item = (Range<usize>, usize)> {
    // Example: 10 tokens, at most 5, overlap 1: 0..5, 3..8 (3 and 4 are context), 6..10 (6 and 7).
    let context = overlap + 1;
    let stride = limit - context;
    let count = 1 + total.saturating_sub(limit).div_ceil(stride);
    (0..count).map(move |index| {
        let start = index * stride;
        (start..total.min(start + limit), if index == 0 { 0 } else { context })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::sample_place::LineOrRecord;
    use proptest::prelude::*;

    #[allow(clippy::unnecessary_wraps, reason = "as those that look it up")]
    fn place() -> Result<SamplePlace, Fault> {
        Ok(SamplePlace { path: std::path::Path::new("train.jsonl").into(), at: LineOrRecord::Line(3) })
    }

    fn outcome(limit: usize, on_too_long: OnTooLong, length: Length) -> Result<LengthOutcome, Fault> {
        LengthOutcome::of(&DataRecipe { on_too_long, ..DataRecipe::default() }, limit, length, place)
    }

    proptest! {
        #[test]
        fn a_cut_sample_is_exactly_as_long_as_allowed(prompt in 0usize..50, rest in 1usize..20, limit in 1usize..60) {
            let length = Length { total: prompt + rest, prompt, is_plain_text: false };
            match outcome(limit, OnTooLong::Truncate, length).unwrap() {
                LengthOutcome::Whole => prop_assert!(length.total <= limit),
                LengthOutcome::Cut(range) => {
                    prop_assert_eq!(length.total - range.len(), limit);
                    prop_assert!(range.start >= 1 && range.end <= prompt);
                    let (front, back) = (range.start, prompt - range.end);
                    prop_assert!(front == back || front == back + 1);
                }
                LengthOutcome::NothingToCut => prop_assert!(rest >= limit),
                LengthOutcome::Dropped | LengthOutcome::Split(_) => prop_assert!(false),
            }
        }
    }

    #[test]
    fn the_recipe_decides() {
        let length = Length { total: 16, prompt: 14, is_plain_text: true };
        assert_eq!(outcome(12, OnTooLong::Drop, length).unwrap(), LengthOutcome::Dropped);
        assert_eq!(outcome(12, OnTooLong::Truncate, length).unwrap(), LengthOutcome::Cut(5..9));
        assert_eq!(outcome(16, OnTooLong::Error, length).unwrap(), LengthOutcome::Whole);
        assert_eq!(outcome(12, OnTooLong::Split, length).unwrap(), LengthOutcome::Split(vec![(0..12, 0), (11..16, 1)]));
        let error = outcome(12, OnTooLong::Error, length).unwrap_err();
        assert_eq!(error.to_string(), "`train.jsonl:3`: 16 tokens, expected at most 12");
    }

    proptest! {
        #[test]
        fn each_token_is_a_target_once(total in 1usize..200, room in 1usize..40, overlap in 0usize..40) {
            let limit = overlap + 1 + room;
            let all: Vec<(Range<usize>, usize)> = windows(total, limit, overlap).collect();
            let mut next = 0;
            for (index, (tokens, context)) in all.iter().enumerate() {
                prop_assert!(tokens.len() <= limit);
                // The last is the only one with room left, and none is context alone.
                prop_assert!(tokens.len() == limit || index + 1 == all.len());
                prop_assert!(*context < tokens.len());
                prop_assert_eq!(*context, if index == 0 { 0 } else { overlap + 1 });
                prop_assert_eq!(tokens.start + context, next);
                next = tokens.end;
            }
            prop_assert_eq!(next, total);
        }
    }
}
