//! Foreign text within a message: escaped and cut, so that no file writes to a terminal or fills it.

use std::fmt::{Display, Write};

/// Characters of a foreign text that are shown.
const SHOWN: usize = 200;

const ITEMS: usize = 20;

/// Bytes of the longest message.
const MESSAGE: usize = 16 << 10;

/// A text that a file, an argument or a client brings, as a message shows it: in one line, control characters escaped, and cut behind 200
/// characters, with its length. The marks around it are the message's.
pub fn quoted(text: impl Display) -> String {
    let text = text.to_string();
    let (mut shown, length) = (escaped(text.chars().take(SHOWN)), text.chars().count());
    if length > SHOWN {
        // Writing to a text never fails.
        let _ = write!(shown, "… ({length} characters)");
    }
    shown
}

/// A number of things, whose word is given for one: `1 row`, `3 rows`, `2 batches`.
pub fn counted(count: usize, word: &str) -> String {
    let end = match word {
        _ if count == 1 => "",
        _ if word.ends_with(['h', 's', 'x']) => "es",
        _ => "s",
    };
    format!("{count} {word}{end}")
}

/// Quotes what ends with what matters, as a path and the words of a parser do: of a long one the last 100 characters are shown
/// as well.
pub fn abridged(text: impl Display) -> String {
    const END: usize = 100;
    let text = text.to_string();
    let length = text.chars().count();
    if length <= SHOWN + END {
        return escaped(text.chars());
    }
    let end = text.char_indices().nth(length - END).map_or("", |(at, _)| &text[at..]);
    format!("{}…{}", quoted(&text), quoted(end))
}

/// A path as a shell takes it, for commands that a message tells. One that begins with a dash would be read as an option.
pub fn shell_word(path: impl Display) -> String {
    let path = path.to_string();
    let path = if path.starts_with('-') { format!("./{path}") } else { path };
    let is_plain = |character: char| character.is_alphanumeric() || "_-./=:,+@%".contains(character);
    let needs_quotes = path.is_empty() || !path.chars().all(is_plain);
    if needs_quotes { format!("'{}'", path.replace('\'', r"'\''")) } else { path }
}

/// Several of them with commas between, at most 20, and how many there are beside.
pub fn listed<T: Display>(items: impl IntoIterator<Item = T>) -> String {
    joined(items, ", ")
}

/// Lists words with something else between; see [`listed`].
pub fn joined<T: Display>(items: impl IntoIterator<Item = T>, between: &str) -> String {
    let mut items = items.into_iter();
    let mut shown: Vec<String> = items.by_ref().take(ITEMS).map(quoted).collect();
    let more = items.count();
    if more > 0 {
        shown.push(format!("… and {more} more"));
    }
    shown.join(between)
}

pub fn shape<T: Display>(axes: &[T]) -> String {
    format!("[{}]", listed(axes))
}

/// A whole message, which may have several lines, as it may be printed: the last guard behind [`quoted`] and [`listed`].
pub fn printable(message: &str) -> String {
    let mut text = String::with_capacity(message.len().min(MESSAGE));
    for (at, character) in message.char_indices() {
        // Room is left for the last words.
        if text.len() > MESSAGE - 64 {
            let _ = write!(text, "… ({} bytes more)", message.len() - at);
            break;
        }
        if matches!(character, '\n' | '\t') { text.push(character) } else { escape(character, &mut text) }
    }
    text
}

/// Whether a character would act on a terminal or a page instead of being shown there: controls, and what turns the direction of writing.
pub fn is_unprintable(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

fn escaped(text: impl Iterator<Item = char>) -> String {
    let mut shown = String::new();
    text.for_each(|character| escape(character, &mut shown));
    shown
}

/// What is unprintable is shown by its number.
fn escape(character: char, text: &mut String) {
    if is_unprintable(character) { text.extend(character.escape_default()) } else { text.push(character) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_is_escaped_and_cut() {
        assert_eq!(quoted("a \u{1b}[31m\r\n\u{202e}b\0é"), "a \\u{1b}[31m\\r\\n\\u{202e}b\\u{0}é");
        assert_eq!(quoted("x".repeat(200)), "x".repeat(200));
        let long = quoted("é".repeat(1 << 20));
        assert_eq!(long, format!("{}… (1048576 characters)", "é".repeat(200)));
        assert_eq!(abridged("x".repeat(300)), "x".repeat(300));
        assert_eq!(
            abridged(format!("{} at line 3", "x".repeat(300))),
            format!("{}… (310 characters)…{} at line 3", "x".repeat(200), "x".repeat(90))
        );
    }

    #[test]
    fn a_shell_takes_a_path_as_it_is() {
        for (path, word) in [("runs/my-1", "runs/my-1"), ("-x", "./-x"), ("ü/x y", "'ü/x y'"), ("it's $1", r"'it'\''s $1'")] {
            assert_eq!(shell_word(path), word);
        }
    }

    #[test]
    fn of_many_items_the_first_are_shown() {
        assert_eq!(listed(["a", "b"]), "a, b");
        assert!(listed(0..100_000).ends_with("18, 19, … and 99980 more"));
        assert_eq!(shape(&[2, 3]), "[2, 3]");
    }

    #[test]
    fn no_message_is_longer_than_16_kib() {
        let whole = "a message\n  of two lines\tand a tab";
        assert_eq!(printable(whole), whole);
        assert_eq!(printable("\u{1b}]0;title\u{7}"), "\\u{1b}]0;title\\u{7}");
        for character in ["x", "é", "\0", "\u{10fffd}"] {
            let long = printable(&character.repeat(1 << 16));
            assert!(long.len() <= MESSAGE && long.ends_with(" bytes more)"), "{}", long.len());
        }
    }
}
