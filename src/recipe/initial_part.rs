//! The initial part of a prompt: how to find where instructions end and what they are about begins.

use std::ops::Range;

use super::words::forms;

/// Which tokens at the start of a prompt are its initial part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InitialPart {
    /// What ends it, searched in the prompt's text; without a match, the whole prompt is the initial part.
    pub end_regex: EndRegex,
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
        let Range { start, end } = self.end_regex.0.find(text)?.range();
        Some(if self.include_end_string { end } else { start })
    }
}

/// A regular expression that is one: read from a recipe, it is refused where it stands if it is not.
///
/// The syntax is that of the crate `regex`: without look-around and back-references, so that a search takes time in proportion to
/// the text.
#[derive(Clone, Debug)]
pub struct EndRegex(regex::Regex);

impl EndRegex {
    /// Compiles `pattern`; the error says in one line what is wrong with it.
    pub fn new(pattern: &str) -> Result<Self, String> {
        regex::Regex::new(pattern).map(Self).map_err(|error| {
            // The crate draws the pattern with a caret in several lines; the last says what is wrong.
            let text = error.to_string();
            let last = text.lines().last().unwrap_or_default();
            format!("`{pattern}` is not a regular expression: {}", last.strip_prefix("error: ").unwrap_or(last))
        })
    }

    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl PartialEq for EndRegex {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for EndRegex {}

forms! {
    EndRegex: "a regular expression, as \"<text>\\\\n\"";
    word<E> |pattern| EndRegex::new(pattern).map_err(E::custom);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_before_or_behind_the_first_match() {
        let end_regex = EndRegex::new("<te?xt>|###").unwrap();
        let mut part = InitialPart { end_regex, include_end_string: true, pad_id: 0, range_is_prefix: true };
        assert_eq!(part.end_in("say: <text> or ### or"), Some(11));
        part.include_end_string = false;
        assert_eq!(
            (part.end_in("say: <text> or ###"), part.end_in("é###"), part.end_in("###"), part.end_in("")),
            (Some(5), Some(2), Some(0), None)
        );
    }

    #[test]
    fn what_is_no_regular_expression_is_refused() {
        assert_eq!(EndRegex::new("###(").unwrap_err(), "`###(` is not a regular expression: unclosed group");
        assert!(EndRegex::new("(?=a)").unwrap_err().contains("look-around"));
        assert_eq!(EndRegex::new("a+"), EndRegex::new("a+"));
    }
}
