//! What Python's text functions do otherwise than Rust's.

/// Whether Python's `str.isspace` and `\s` hold: Unicode's white space, and four separators of ASCII.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Python's `text.strip()`: takes four separators of ASCII off, too.
pub fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// What Python's `text.split()` makes of it.
pub(super) fn split(text: &str) -> impl Iterator<Item = &str> {
    text.split(is_space).filter(|word| !word.is_empty())
}

pub(super) fn one_if(is: bool) -> f64 {
    f64::from(u8::from(is))
}

/// The harmonic mean of precision and recall; 0 if both are.
pub(super) fn harmonic(precision: f64, recall: f64) -> f64 {
    if precision + recall > 0.0 { 2.0 * precision * recall / (precision + recall) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separators_are_white_space_and_what_has_no_width_is_not() {
        assert_eq!(strip("\u{1c}\u{a0}\u{2003}\u{3000}\u{85}a\u{200b}\u{feff}\u{2028}\u{1f}"), "a\u{200b}\u{feff}");
        assert_eq!(split(" a\u{1d}b\u{a0}\tc ").collect::<Vec<_>>(), ["a", "b", "c"]);
    }
}
