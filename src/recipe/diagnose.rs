//! What a refused recipe looks like: the message, the place with a caret, and the nearest spelling that exists.

use std::path::{Path, PathBuf};
use std::{fmt, io};

use crate::units::{Exit, Fault, FaultKind, abridged, quoted};

/// Why a recipe is refused. Prints the message, and below it the place as it stands in the recipe.
#[derive(Clone, Debug)]
pub struct RecipeError {
    /// What is wrong: what was expected and what was found.
    pub message: String,
    pub place: Box<RecipeLocation>,
    pub hint: Option<String>,
    /// What else is wrong with the recipe, in the order of its lines.
    pub further: Vec<RecipeError>,
    /// What can be taken out, so that the rest of the value is read.
    pub(super) culprit: Option<Spot>,
}

pub(super) type Checked<T> = Result<T, RecipeError>;

/// Where a key or value was written, as an address into a recipe and its overrides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Spot {
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

/// Where something of a recipe was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecipeLocation {
    Text {
        /// The recipe, as the user named it.
        path: PathBuf,
        line: usize,
        /// Counted from 1, in characters.
        column: usize,
        text: String,
        /// How many characters are meant.
        width: usize,
    },
    /// The file as a whole.
    File(PathBuf),
    /// An override, as given behind `--set`.
    Override(String),
    /// Nowhere: the value was made by a program.
    Code,
}

impl RecipeError {
    /// The file cannot be read.
    pub(super) fn unread(path: &Path, error: &Fault) -> Self {
        let message = error.io().map_or_else(|| error.to_string(), ToString::to_string);
        let is_missing = error.io().is_some_and(|source| source.kind() == io::ErrorKind::NotFound);
        let is_no_file = error.io().is_none() && error.kind() == FaultKind::NotRegular;
        let hint = error.hint().filter(|_| !is_missing && !is_no_file);
        Self {
            message: format!("the recipe cannot be read: {message}"),
            place: Box::new(RecipeLocation::File(path.to_owned())),
            hint: hint.or_else(|| Some("name a recipe in TOML, as `recipes/quickstart.toml`".to_owned())),
            ..Self::plain(String::new())
        }
    }

    /// An error that was made by a program.
    pub fn plain(message: String) -> Self {
        Self { message, place: Box::new(RecipeLocation::Code), hint: None, further: Vec::new(), culprit: None }
    }
}

impl From<RecipeError> for Fault {
    fn from(error: RecipeError) -> Self {
        let fault =
            Self::new(Exit::Usage, error.to_string()).with_further(error.further.iter().cloned().map(Self::from).collect());
        error.hint.clone().into_iter().fold(fault, Self::with_hint).carrying(error)
    }
}

impl fmt::Display for RecipeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.message, self.place)
    }
}

impl std::error::Error for RecipeError {}

impl RecipeLocation {
    /// In one word, for notes: `quickstart.toml:14` or `--set lora.rank=8`.
    pub(super) fn short(&self) -> String {
        match self {
            Self::Text { path, line, .. } => format!("{}:{line}", abridged(path.display())),
            Self::File(path) => abridged(path.display()),
            Self::Override(text) => format!("--set {}", quoted(without_secret(text))),
            Self::Code => "code".to_owned(),
        }
    }
}

/// Characters of the line that are shown before the place and from it on.
const BEFORE: usize = 100;
const BEHIND: usize = 160;

/// Begins with a line feed, so that it can follow a message; empty where there is no place.
impl fmt::Display for RecipeLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (path, line, column, text, width) = match self {
            Self::Text { path, line, column, text, width } => (path, *line, *column, without_secret(text), *width),
            Self::Code => return Ok(()),
            Self::File(_) | Self::Override(_) => return write!(f, "\n  --> {}", self.short()),
        };
        let gutter = " ".repeat(line.to_string().len());
        // Of a long line a window is shown. Tabs stay tabs, so that the caret stands below its key whatever a tab's width is.
        let first = (column - 1).saturating_sub(BEFORE);
        let window =
            || text.chars().skip(first).take(BEFORE + BEHIND).map(|c| if c.is_control() && c != '\t' { '\u{fffd}' } else { c });
        let indent: String = window().take(column - 1 - first).map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
        let text: String = window().collect();
        write!(f, "\n{gutter}--> {}:{line}:{column}\n{gutter} |\n{line} | {text}\n", abridged(path.display()))?;
        write!(f, "{gutter} | {indent}{}", "^".repeat(width.min(BEHIND)))
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
pub(super) fn listed<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
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
        None => format!("choose {}", listed(known.iter().copied())),
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
        let place = RecipeLocation::Text { path: "a.toml".into(), line: 14, column: 2, text: "\tchunk = 8".into(), width: 5 };
        assert_eq!(place.to_string(), "\n  --> a.toml:14:2\n   |\n14 | \tchunk = 8\n   | \t^^^^^");
    }
}
