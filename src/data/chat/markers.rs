//! Two characters around what an assistant writes, which nothing else contains, show after rendering where that stands.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// The characters: noncharacters of Unicode, which stand in no proper text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Markers {
    pub(super) open: char,
    pub(super) close: char,
}

impl Markers {
    /// The first two that are in no text; the very first where a text has them all.
    pub(super) fn absent_from(is_taken: &dyn Fn(char) -> bool) -> Self {
        let mut free = ('\u{fdd0}'..='\u{fdef}').filter(|&marker| !is_taken(marker));
        let open = free.next().unwrap_or('\u{fdd0}');
        Self { open, close: free.next().unwrap_or('\u{fdd1}') }
    }
}

/// The text without its markers, and in bytes what they enclosed; `None` where they are not in pairs.
pub(super) fn taken_out(marked: &str, markers: Markers) -> Option<(String, Vec<Range<usize>>)> {
    let mut text = String::with_capacity(marked.len());
    let (mut spans, mut open) = (Vec::new(), None);
    for c in marked.chars() {
        match open {
            None if c == markers.open => open = Some(text.len()),
            Some(start) if c == markers.close => {
                if start < text.len() {
                    spans.push(start..text.len());
                }
                open = None;
            }
            _ if c == markers.open || c == markers.close => return None,
            _ => text.push(c),
        }
    }
    open.is_none().then_some((text, spans))
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)]
mod tests {
    use super::*;

    #[test]
    fn markers_come_in_pairs() {
        let markers = Markers::absent_from(&|marker| marker == '\u{fdd0}');
        assert_eq!(markers, Markers { open: '\u{fdd1}', close: '\u{fdd2}' });
        let marked = |text: &str| taken_out(&text.replace('<', "\u{fdd1}").replace('>', "\u{fdd2}"), markers);
        assert_eq!(marked("a<é>b<>c"), Some(("aébc".to_owned(), vec![1..3])));
        for broken in ["a<b", "a>b", "<a<b>>", "<a>>"] {
            assert_eq!(marked(broken), None, "{broken}");
        }
    }
}
