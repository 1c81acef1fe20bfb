//! A long text as windows: each of its tokens is a target in one of them.

use std::ops::Range;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) tokens: Range<usize>,
    /// The first of them that are context only: they are targets in the window before.
    pub(super) context: usize,
}

/// The windows of a text of `total` tokens: each of at most `limit` tokens, and all but the first begin with `overlap` tokens which the
/// model has run before.
///
/// Whatever the overlap, a window's first token is one of the window before, as nothing else could predict the second. `limit` must be
/// above `overlap` + 1, and `total` above 0.
pub(super) fn windows(total: usize, limit: usize, overlap: usize) -> impl Iterator<Item = Window> {
    // Example: 10 tokens, at most 5, overlap 1: 0..5, 3..8 (3 and 4 are context), 6..10 (6 and 7).
    let context = overlap + 1;
    let stride = limit - context;
    let count = 1 + total.saturating_sub(limit).div_ceil(stride);
    (0..count).map(move |index| {
        let start = index * stride;
        Window { tokens: start..total.min(start + limit), context: if index == 0 { 0 } else { context } }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_token_is_a_target_once(total in 1usize..200, room in 1usize..40, overlap in 0usize..40) {
            let limit = overlap + 1 + room;
            let all: Vec<Window> = windows(total, limit, overlap).collect();
            let mut next = 0;
            for (index, window) in all.iter().enumerate() {
                prop_assert!(window.tokens.len() <= limit);
                // The last is the only one with room left, and none is context alone.
                prop_assert!(window.tokens.len() == limit || index + 1 == all.len());
                prop_assert!(window.context < window.tokens.len());
                prop_assert_eq!(window.context, if index == 0 { 0 } else { overlap + 1 });
                prop_assert_eq!(window.tokens.start + window.context, next);
                next = window.tokens.end;
            }
            prop_assert_eq!(next, total);
        }
    }
}
