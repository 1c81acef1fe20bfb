//! Makes one long-context question: documents one after another, a sentence hidden far in front, four choices.

use std::collections::VecDeque;

use rand::RngExt;
use rand::seq::{IndexedRandom, SliceRandom};
use rand_chacha::ChaCha12Rng;

use super::documents::DemoDocument;
use crate::data::longbench_v2::Record;

/// Characters of one piece of a document within a context: several documents make up each context.
const PIECE: usize = 16_000;

/// A shorter rest of a piece is not worth a heading of its own.
const MIN_REST: usize = 2_000;

/// Where in the context the sentence may stand; always far from the question at its end.
const DEPTH: std::ops::Range<f64> = 0.02..0.6;

const NAMES: [&str; 32] = [
    "amber", "anchor", "basalt", "beacon", "birch", "bronze", "cedar", "cobalt", "copper", "coral", "crystal", "delta", "ember",
    "falcon", "garnet", "glacier", "granite", "harbor", "heron", "indigo", "ivory", "juniper", "lantern", "marble", "meadow",
    "onyx", "orchid", "pebble", "quartz", "raven", "saffron", "willow",
];

const PLACES: [&str; 16] = [
    "northern", "southern", "eastern", "western", "upper", "lower", "inner", "outer", "old", "new", "first", "second", "central",
    "coastal", "river", "mountain",
];

const CODES: [&str; 32] = [
    "apple", "arrow", "bottle", "bridge", "button", "candle", "castle", "circle", "cloud", "dragon", "engine", "feather",
    "flower", "garden", "guitar", "hammer", "island", "jacket", "kettle", "ladder", "mirror", "needle", "ocean", "pencil",
    "planet", "rabbit", "river", "saddle", "spoon", "table", "violin", "window",
];

/// Pieces of documents, handed out one after another; each is used once.
pub(super) struct Pool {
    pieces: VecDeque<(String, String)>,
}

impl Pool {
    pub(super) fn new(documents: &[DemoDocument], rng: &mut ChaCha12Rng) -> Self {
        let mut pieces = Vec::new();
        for document in documents {
            for (part, text) in split_at_lines(&document.text, PIECE).into_iter().enumerate() {
                let title = if part == 0 { document.title.clone() } else { format!("{}, part {}", document.title, part + 1) };
                pieces.push((title, text.to_owned()));
            }
        }
        pieces.shuffle(rng);
        Self { pieces: pieces.into() }
    }

    /// A context of `wanted` tokens as `count` measures them; `None` when the pieces are used up.
    pub(super) fn context(&mut self, wanted: usize, count: &dyn Fn(&str) -> usize) -> Option<String> {
        let mut context = String::new();
        let mut tokens = 0;
        while tokens < wanted {
            let (title, text) = self.pieces.pop_front()?;
            let piece = format!("{}# {title}\n\n{text}\n", if context.is_empty() { "" } else { "\n" });
            let size = count(&piece);
            if tokens + size <= wanted {
                context.push_str(&piece);
            } else {
                // The last piece is cut where the wanted length is reached; the next context begins with its rest.
                let share = (piece.len() * (wanted - tokens) / size).max(1);
                let used = split_at_lines(&piece, share)[0];
                context.push_str(used);
                let rest = &piece[used.len()..];
                if rest.len() > MIN_REST {
                    self.pieces.push_front((format!("{title}, continued"), rest.to_owned()));
                }
            }
            tokens += size;
        }
        Some(context)
    }
}

/// Parts of at most about `size` bytes, cut behind a line's end where there is one in the second half of a part.
fn split_at_lines(text: &str, size: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text;
    while rest.len() > size {
        let end = char_border(rest, size);
        let end = rest[..end].rfind('\n').filter(|&line| line >= size / 2).map_or(end, |line| line + 1);
        let (part, after) = rest.split_at(end);
        parts.push(part);
        rest = after;
    }
    if !rest.trim().is_empty() || parts.is_empty() {
        parts.push(rest);
    }
    parts
}

/// Hides a sentence in the context and asks for it; `letter` (0 to 3) is the right answer.
pub(super) fn ask(context: &str, letter: usize, rng: &mut ChaCha12Rng) -> Record {
    let pick = |words: &[&'static str], rng: &mut ChaCha12Rng| words.choose(rng).copied().unwrap_or("plain");
    let name = format!("{} {}", pick(&PLACES, rng), pick(&NAMES, rng));
    let mut codes = CODES;
    let (codes, _) = codes.partial_shuffle(rng, 4);
    let sentence = format!("The access code of the {name} archive is {}.", codes[letter]);
    let depth = rng.random_range(DEPTH);
    let at = border(context, (context.len() as f64 * depth) as usize);
    let context = format!("{}\n{sentence}\n\n{}", &context[..at], &context[at..]);
    let id = blake3::hash(context.as_bytes()).to_hex()[..24].to_owned();
    Record {
        id,
        domain: "Multi-Document QA".to_owned(),
        sub_domain: "Hidden sentence".to_owned(),
        difficulty: if depth < DEPTH.end / 2.0 { "hard" } else { "easy" }.to_owned(),
        length: "short".to_owned(),
        question: format!("What is the access code of the {name} archive?"),
        choice_a: codes[0].to_owned(),
        choice_b: codes[1].to_owned(),
        choice_c: codes[2].to_owned(),
        choice_d: codes[3].to_owned(),
        answer: ["A", "B", "C", "D"][letter].to_owned(),
        context,
    }
}

/// The first border of characters at or behind a byte.
fn char_border(text: &str, from: usize) -> usize {
    (from..text.len()).find(|&at| text.is_char_boundary(at)).unwrap_or(text.len())
}

/// The next border of paragraphs at or behind `from`, else of lines.
fn border(text: &str, from: usize) -> usize {
    let from = char_border(text, from);
    let behind = |pattern: &str| text[from..].find(pattern).map(|found| from + found + pattern.len());
    // A paragraph of many pages would push the sentence towards the question.
    behind("\n\n").filter(|&at| at < from + 2_000).or_else(|| behind("\n")).unwrap_or(from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn contexts_have_the_wanted_length_and_hide_the_sentence_far_in_front() {
        let mut rng = ChaCha12Rng::seed_from_u64(5);
        let text = "One line of some document.\nAnother line, é.\n\n".repeat(900);
        let document = |title: &str| DemoDocument { title: title.to_owned(), source: 0, text: text.clone() };
        let documents = [document("a"), document("b"), document("c")];
        let mut pool = Pool::new(&documents, &mut rng);
        let count = |text: &str| text.len() / 4;
        let context = pool.context(9_000, &count).unwrap();
        assert!((8_900..=9_000).contains(&count(&context)), "{}", count(&context));
        assert!(context.starts_with("# ") && context.matches("\n# ").count() >= 2);
        let record = ask(&context, 2, &mut rng);
        let code = &record.choice_c;
        let at = record.context.find(&format!(" archive is {code}.\n")).unwrap();
        assert!(at < record.context.len() * 7 / 10);
        assert_eq!(record.answer, "C");
        assert!(record.question.starts_with("What is the access code of the "));
        let sentence = record.context.lines().find(|line| line.starts_with("The access code")).unwrap();
        assert_eq!(record.context.replacen(&format!("\n{sentence}\n\n"), "", 1), context);
        assert!(pool.context(90_000, &count).is_none());
    }

    #[test]
    fn parts_make_up_the_text() {
        for (text, size) in [("ééé\néé", 3), ("abc", 1), ("", 5), ("a\nb\nc\n", 4), ("no lines at all", 4)] {
            assert_eq!(split_at_lines(text, size).concat(), text, "{text:?} by {size}");
        }
    }
}
