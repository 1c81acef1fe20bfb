//! Marks around what an assistant writes show after rendering where that stands.

use std::ops::Range;

/// Noncharacters of Unicode, two each: no proper text has even one. Where one has a mark, it does not come out as it is without marks.
pub(super) const OPEN: &str = "\u{fdd0}\u{fdd1}";
pub(super) const CLOSE: &str = "\u{fdd2}\u{fdd3}";

/// The text without its marks, and in bytes what they enclosed; `None` where they are not in pairs.
pub(super) fn taken_out(marked: &str) -> Option<(String, Vec<Range<usize>>)> {
    let mut parts = marked.split(OPEN);
    let (mut text, mut spans) = (parts.next()?.to_owned(), Vec::new());
    for part in parts {
        let (inside, behind) = part.split_once(CLOSE)?;
        let span = text.len()..text.len() + inside.len();
        spans.extend((!span.is_empty()).then_some(span));
        text.extend([inside, behind]);
    }
    (!text.contains(CLOSE)).then_some((text, spans))
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)]
mod tests {
    use super::*;

    #[test]
    fn marks_come_in_pairs() {
        let marked = |text: &str| taken_out(&text.replace('<', OPEN).replace('>', CLOSE));
        assert_eq!(marked("a<é>b<>c"), Some(("aébc".to_owned(), vec![1..3])));
        for broken in ["a<b", "a>b", "<a<b>>", "<a>>"] {
            assert_eq!(marked(broken), None, "{broken}");
        }
    }
}
