//! What a refused recipe looks like: the message, the place with a caret, and the nearest spelling that exists.

use std::path::{Path, PathBuf};

use crate::units::{Fault, abridged, quoted};

/// What is refused is told with its place in the recipe, and carries its [`Spot`].
pub(super) type Checked<T> = Result<T, Fault>;

/// Where a key or value was written, as an address into a recipe and its overrides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Spot {
    /// Nowhere: a program made the value; or in the file as a whole.
    #[default]
    Code,
    /// In the recipe: its bytes from, to.
    Text(usize, usize),
    Override(usize),
}

impl Spot {
    pub(super) fn is_override(self) -> bool {
        matches!(self, Self::Override(_))
    }
}

/// What the user wrote: the recipe's text, and the overrides.
#[derive(Debug)]
pub(super) struct RecipeSource {
    /// What the user calls it; empty where a program made the values.
    pub(super) path: PathBuf,
    pub(super) text: String,
    /// What stands behind `--set`, one by one.
    pub(super) overrides: Vec<String>,
    /// The way out of a key that does not exist, from its table (dotted), the key, and the keys of the table. It knows all tables,
    /// which who reads one of them does not.
    pub(super) suggest_key: fn(&str, &str, &[&str]) -> String,
}

impl Default for RecipeSource {
    fn default() -> Self {
        let suggest_key = |_: &str, written: &str, known: &[&str]| suggest(written, known);
        Self { path: PathBuf::new(), text: String::new(), overrides: Vec::new(), suggest_key }
    }
}

/// An error of a file as a whole.
pub(super) fn of_file(path: &Path, message: String, hint: impl Into<String>) -> Fault {
    RecipeSource { path: path.to_owned(), ..RecipeSource::default() }.reject(Spot::Code, message, hint)
}

/// Where it was written what an error refuses.
pub(super) fn spot_of(error: &Fault) -> Spot {
    error.payload().copied().unwrap_or_default()
}

/// Characters of the line that are shown before the place and from it on.
const BEFORE: usize = 100;
const BEHIND: usize = 160;

impl RecipeSource {
    /// An error that prints the message, and below it the place as it stands in the recipe.
    pub(super) fn reject(&self, spot: Spot, message: String, hint: impl Into<String>) -> Fault {
        let place = match spot {
            Spot::Text(start, end) => self.shown(start, end),
            Spot::Code if self.path.as_os_str().is_empty() => String::new(),
            Spot::Code | Spot::Override(_) => format!("\n  --> {}", self.short(spot)),
        };
        Fault::usage(message + &place, hint).carrying(spot)
    }

    /// Refuses a key that `table` (dotted; empty at the top level) does not have.
    pub(super) fn unknown_key(&self, spot: Spot, table: &str, key: &str, known: &[&str]) -> Fault {
        let place = if table.is_empty() { "at the top level".to_owned() } else { format!("in `[{}]`", abridged(table)) };
        self.reject(spot, format!("unknown key `{}` {place}", quoted(key)), (self.suggest_key)(table, key, known))
    }

    /// A place in one word, for notes: `quickstart.toml:14` or `--set lora.rank=8`.
    pub(super) fn short(&self, spot: Spot) -> String {
        let path = abridged(self.path.display());
        match spot {
            Spot::Text(start, _) => format!("{path}:{}", self.line_and_column(start).0),
            Spot::Override(index) => format!("--set {}", quoted(without_secret(&self.overrides[index]))),
            Spot::Code if path.is_empty() => "code".to_owned(),
            Spot::Code => path,
        }
    }

    /// Counted from 1, the column in characters.
    fn line_and_column(&self, at: usize) -> (usize, usize) {
        let before = &self.text[..at];
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
    }

    /// The line of a place, with a caret below. It begins with a line feed, so that it can follow a message.
    fn shown(&self, start: usize, end: usize) -> String {
        let (line, column) = self.line_and_column(start);
        let text = without_secret(self.text.lines().nth(line - 1).unwrap_or_default());
        let width = self.text[start..end].lines().next().unwrap_or_default().chars().count().clamp(1, BEHIND);
        let gutter = " ".repeat(line.to_string().len());
        // Of a long line a window is shown. Tabs stay tabs, so that the caret stands below its key whatever a tab's width is.
        let first = (column - 1).saturating_sub(BEFORE);
        let window =
            || text.chars().skip(first).take(BEFORE + BEHIND).map(|c| if c.is_control() && c != '\t' { '\u{fffd}' } else { c });
        let indent: String = window().take(column - 1 - first).map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
        let text: String = window().collect();
        let (path, carets) = (abridged(self.path.display()), "^".repeat(width));
        format!("\n{gutter}--> {path}:{line}:{column}\n{gutter} |\n{line} | {text}\n{gutter} | {indent}{carets}")
    }
}

/// A line up to its value where its key is that of a secret: what is printed is kept in logs.
fn without_secret(line: &str) -> &str {
    const SECRETS: [&str; 9] =
        ["key", "apikey", "token", "secret", "password", "passwd", "passphrase", "credential", "credentials"];
    let is_secret = |word: &str| SECRETS.iter().any(|secret| word.eq_ignore_ascii_case(secret));
    let is_border = |c: char| !c.is_ascii_alphanumeric();
    let mut end = 0;
    // Once over the line, however long it is.
    let secret = line.split_inclusive(is_border).find_map(|word| {
        end += word.len();
        is_secret(word.trim_end_matches(is_border)).then_some(end - usize::from(word.ends_with('=')))
    });
    secret.and_then(|end| Some(&line[..=end + line[end..].find('=')?])).unwrap_or(line)
}

/// The candidate that was most likely meant by `written`, if any is near enough.
pub(crate) fn nearest<'a>(written: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // What is longer than any name is no slip of the pen.
    if written.len() > 128 {
        return None;
    }
    let typed = bare(written);
    let near = candidates.into_iter().filter_map(|candidate| {
        let known = bare(candidate);
        let distance = edits(&typed, &known);
        let is_beginning = typed.len() >= 3 && known.starts_with(&typed);
        let allowed = (typed.len().max(known.len()) / 3).max(1);
        ((distance <= allowed && distance < typed.len()) || is_beginning).then_some((distance, candidate))
    });
    near.min_by_key(|(distance, _)| *distance).map(|(_, candidate)| candidate)
}

/// `cacheLength`, `cache-length` and `cache_length` differ in nothing that a person means.
fn bare(word: &str) -> Vec<char> {
    word.chars().filter(|c| !matches!(c, '_' | '-')).flat_map(char::to_lowercase).collect()
}

/// Insertions, deletions, substitutions and swaps of neighbours that lead from one word to the other.
fn edits(a: &[char], b: &[char]) -> usize {
    let mut before: Vec<usize> = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            row[j] = (last[j] + 1).min(row[j - 1] + 1).min(last[j - 1] + usize::from(a[i - 1] != b[j - 1]));
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

/// `` `a`, `b` or `c` ``.
pub(super) fn one_of<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    let quoted: Vec<String> = words.into_iter().map(|word| format!("`{word}`")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}

/// The way out of a word that is not among the known ones.
pub(super) fn suggest(written: &str, known: &[&str]) -> String {
    match nearest(written, known.iter().copied()) {
        Some(word) => format!("did you mean `{word}`?"),
        None => format!("choose {}", one_of(known.iter().copied())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_as_far_apart_as_a_person_would_say() {
        let distance = |a: &str, b: &str| edits(&bare(a), &bare(b));
        assert_eq!(distance("chunk_sise", "chunk_size"), 1);
        assert_eq!(distance("hcunk_size", "chunk_size"), 1);
        assert_eq!(distance("cacheLength", "cache_length"), 0);
        assert_eq!(distance("", "abc"), 3);
    }

    #[test]
    fn far_words_are_not_suggested() {
        assert_eq!(nearest("x", ["r", "alpha"]), None);
        assert_eq!(nearest("temperature", ["r", "alpha", "dropout"]), None);
        assert_eq!(nearest("drop", ["r", "alpha", "dropout"]), Some("dropout"));
        assert_eq!(suggest("h20", &["dense", "h2o", "lastrec"]), "did you mean `h2o`?");
        assert_eq!(suggest("snapkv", &["dense", "h2o", "lastrec"]), "choose `dense`, `h2o` or `lastrec`");
    }

    #[test]
    fn the_caret_stands_below_the_key() {
        let text = format!("{}\tchunk = 8\n", "\n".repeat(13));
        let source = RecipeSource { path: "a.toml".into(), text, ..RecipeSource::default() };
        let error = source.reject(Spot::Text(14, 19), "x".to_owned(), "");
        assert_eq!(error.to_string(), "x\n  --> a.toml:14:2\n   |\n14 | \tchunk = 8\n   | \t^^^^^");
    }
}
