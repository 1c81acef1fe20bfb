//! Texts that the TOML parser is not asked about: YAML, and nesting that no recipe has, on which the parser spends minutes.

use std::path::Path;

use crate::units::{abridged, shell_word};

/// Arrays and inline tables within each other.
const DEEPEST: usize = 64;

/// Where arrays or inline tables are nested too deeply, as the bytes from, to.
pub(super) fn too_deep(text: &str) -> Option<(usize, usize)> {
    let (bytes, mut at, mut depth) = (text.as_bytes(), 0, 0_usize);
    while at < bytes.len() {
        match bytes[at] {
            b'#' => at += text[at..].find('\n').unwrap_or(text.len() - at),
            quote @ (b'"' | b'\'') => at = end_of_string(bytes, at, quote),
            b'[' | b'{' if depth == DEEPEST => return Some((at, at + 1)),
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += 1;
    }
    None
}

/// The last byte of the string that begins at `start`, or of the text.
fn end_of_string(bytes: &[u8], start: usize, quote: u8) -> usize {
    let is_long = bytes[start..].starts_with(&[quote; 3]);
    let mut at = start + if is_long { 3 } else { 1 };
    while at < bytes.len() {
        match bytes[at] {
            b'\\' if quote == b'"' => at += 1,
            byte if byte == quote && !is_long => return at,
            byte if byte == quote && bytes[at..].starts_with(&[quote; 3]) => return at + 2,
            b'\n' if !is_long => return at,
            _ => {}
        }
        at += 1;
    }
    at
}

/// The way out of a text that is YAML, told from the file's name or from the first line that says something.
pub(super) fn yaml(path: &Path, text: &str) -> Option<String> {
    let first = text.lines().map(str::trim_end).find(|line| !line.is_empty() && !line.starts_with('#')).unwrap_or_default();
    let (key, rest) = first.split_once(':').unwrap_or(("", first));
    let is_key = !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-'));
    let is_named = path.extension().is_some_and(|ending| ending == "yaml" || ending == "yml");
    let is_yaml = is_named || first == "---" || is_key && (rest.is_empty() || rest.starts_with(' '));
    is_yaml.then(|| format!("`kvtune init --from {}` writes a recipe in TOML", abridged(shell_word(path.display()))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brackets_count_outside_of_strings_and_comments() {
        let deep = "[".repeat(DEEPEST + 1);
        assert_eq!(too_deep(&format!("a = {deep}")), Some((4 + DEEPEST, 5 + DEEPEST)));
        for quiet in [
            format!("a = \"{deep}\""),
            format!("a = \"\\\"{deep}\" # {deep}\nb = '{deep}'"),
            format!("a = \"\"\"\n\"{deep}\n\"\"\"\nb = '''\n'{deep}'''"),
            "[a]\n[[b]]\nc = [{ d = [1] }]\n".repeat(1000),
            format!("a = {}{}", "[".repeat(DEEPEST), "]".repeat(DEEPEST)),
        ] {
            assert_eq!(too_deep(&quiet), None, "{quiet}");
        }
        // A string that has no end hides nothing on the next line.
        assert!(too_deep(&format!("a = \"b\nc = {deep}")).is_some());
    }

    #[test]
    fn yaml_is_told_by_its_name_or_its_first_line() {
        let is_yaml = |path: &str, text: &str| yaml(Path::new(path), text).is_some();
        assert!(
            is_yaml("a.yml", "") && is_yaml("a", "# x\n\nbase_model: m\n") && is_yaml("a", "---\n") && is_yaml("a", "lora:\n")
        );
        assert!(!is_yaml("a.toml", "[model]\npath = \"a: b\"\n") && !is_yaml("a", "a = 'x: y'\nb: 1") && !is_yaml("a", ""));
    }
}
