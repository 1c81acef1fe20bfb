//! Texts that are YAML, where a recipe was expected.

use std::path::Path;

use crate::units::{abridged, shell_word};

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
    fn yaml_is_told_by_its_name_or_its_first_line() {
        let is_yaml = |path: &str, text: &str| yaml(Path::new(path), text).is_some();
        assert!(
            is_yaml("a.yml", "") && is_yaml("a", "# x\n\nbase_model: m\n") && is_yaml("a", "---\n") && is_yaml("a", "lora:\n")
        );
        assert!(!is_yaml("a.toml", "[model]\npath = \"a: b\"\n") && !is_yaml("a", "a = 'x: y'\nb: 1") && !is_yaml("a", ""));
    }
}
