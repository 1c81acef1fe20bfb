//! The initial part of a prompt: how to find where instructions end and what they are about begins.

use std::ops::Range;

use super::modules::WrittenRegex;

/// Which tokens at the start of a prompt are its initial part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InitialPart {
    /// What ends it, searched in the prompt's text; without a match, the whole prompt is the initial part.
    pub end_regex: WrittenRegex,
    /// Whether it ends behind the match, or else before.
    pub include_end_string: bool,
    /// The token that sequences of token ids are padded with on the left.
    pub pad_id: u32,
    /// Whether such pads belong to it.
    pub range_is_prefix: bool,
}

impl InitialPart {
    /// Where it ends in `text`, in bytes; `None` without a match.
    pub fn end_in(&self, text: &str) -> Option<usize> {
        let Range { start, end } = self.end_regex.compiled().find(text)?.range();
        Some(if self.include_end_string { end } else { start })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_before_or_behind_the_first_match() {
        let end_regex = WrittenRegex::new("<te?xt>|###").unwrap();
        let mut part = InitialPart { end_regex, include_end_string: true, pad_id: 0, range_is_prefix: true };
        assert_eq!(part.end_in("say: <text> or ### or"), Some(11));
        part.include_end_string = false;
        assert_eq!(
            (part.end_in("say: <text> or ###"), part.end_in("é###"), part.end_in("###"), part.end_in("")),
            (Some(5), Some(2), Some(0), None)
        );
    }
}
