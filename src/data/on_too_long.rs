//! What becomes of a sample that is longer than the limit.

use std::ops::Range;

use super::faults::RowFault;
use super::sample_place::SamplePlace;
use crate::recipe::OnTooLong;
use crate::units::Fault;

/// Tokens of a sample, before anything is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Length {
    pub(super) total: usize,
    /// The leading ones that may be cut.
    pub(super) prompt: usize,
}

/// What happens to a sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    Whole,
    /// This part of the prompt is cut out.
    Cut(Range<usize>),
    /// It is left out because the recipe says so.
    Dropped,
    /// It is left out because what may not be cut is too long already.
    NothingToCut,
    Split,
}

pub(super) fn fit(
    length: Length,
    limit: usize,
    on_too_long: OnTooLong,
    place: impl FnOnce() -> Result<SamplePlace, Fault>,
) -> Result<Fit, Fault> {
    if length.total <= limit {
        return Ok(Fit::Whole);
    }
    match on_too_long {
        OnTooLong::Split => Ok(Fit::Split),
        OnTooLong::Drop => Ok(Fit::Dropped),
        OnTooLong::Error => {
            let place = place()?;
            let message = format!("{place}: {} tokens, expected at most {limit}", length.total);
            let hint = "set `data.on_too_long` to \"drop\" or \"truncate\", raise `data.max_seq_length` as far as the model's positions \
                        allow, or have more positions with `model.rope_scaling`";
            Err(RowFault::too_long(place, message, hint))
        }
        OnTooLong::Truncate => {
            let kept = limit.saturating_sub(length.total - length.prompt);
            if kept == 0 {
                return Ok(Fit::NothingToCut);
            }
            // Example: 10 of 14 prompt tokens stay: 5 at the front and 5 at the back, 5..9 goes.
            Ok(Fit::Cut(kept.div_ceil(2)..length.prompt - kept / 2))
        }
    }
}

/// A sample that is too long, and cannot become windows.
pub(super) fn no_plain_text(place: SamplePlace, length: Length, limit: usize) -> Fault {
    let expected = format!("at most {limit}, or a text all of whose tokens are targets, which can be split");
    let message = format!("{place}: {} tokens, expected {expected}", length.total);
    RowFault::too_long(place, message, "set `data.on_too_long` to \"drop\" or \"truncate\", or raise `data.max_seq_length`")
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

    proptest! {
        #[test]
        fn a_cut_sample_is_exactly_as_long_as_allowed(prompt in 0usize..50, rest in 1usize..20, limit in 1usize..60) {
            let length = Length { total: prompt + rest, prompt };
            match fit(length, limit, OnTooLong::Truncate, place).unwrap() {
                Fit::Whole => prop_assert!(length.total <= limit),
                Fit::Cut(range) => {
                    prop_assert_eq!(length.total - range.len(), limit);
                    prop_assert!(range.start >= 1 && range.end <= prompt);
                    let (front, back) = (range.start, prompt - range.end);
                    prop_assert!(front == back || front == back + 1);
                }
                Fit::NothingToCut => prop_assert!(rest >= limit),
                Fit::Dropped | Fit::Split => prop_assert!(false),
            }
        }
    }

    #[test]
    fn the_recipe_decides() {
        let length = Length { total: 16, prompt: 14 };
        assert_eq!(fit(length, 12, OnTooLong::Drop, place).unwrap(), Fit::Dropped);
        assert_eq!(fit(length, 12, OnTooLong::Truncate, place).unwrap(), Fit::Cut(5..9));
        assert_eq!(fit(length, 16, OnTooLong::Error, place).unwrap(), Fit::Whole);
        assert_eq!(fit(length, 12, OnTooLong::Split, place).unwrap(), Fit::Split);
        let error = fit(length, 12, OnTooLong::Error, place).unwrap_err();
        assert_eq!(error.to_string(), "`train.jsonl:3`: 16 tokens, expected at most 12");
    }
}
