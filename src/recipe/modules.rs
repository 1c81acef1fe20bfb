//! Which modules a setting of an adapter means, by PEFT's rules for names and regular expressions.

use std::fmt;

use serde::{Serialize, Serializer};

use super::diagnose::Checked;
use super::tree::Document;
use super::value::{RecipeValue, Spellings};
use super::words::forms;

/// A regular expression with the text it was written as: read from a recipe, it is refused where it stands if it is none.
///
/// The syntax is that of the crate `regex`: without look-around and back-references, so that a search takes time in proportion to
/// the text.
#[derive(Clone, Debug)]
pub struct WrittenRegex {
    written: String,
    compiled: regex::Regex,
}

impl WrittenRegex {
    /// Compiles `written`; the error says in one line what is wrong with it.
    pub fn new(written: &str) -> Result<Self, String> {
        Self::matched_as(written, written)
    }

    /// Compiles `as_matched`, which a program makes of `written`; that is shown, and compared.
    pub fn matched_as(written: &str, as_matched: &str) -> Result<Self, String> {
        match regex::Regex::new(as_matched) {
            Ok(compiled) => Ok(Self { written: written.to_owned(), compiled }),
            Err(error) => {
                // The crate draws the pattern with a caret in several lines; the last says what is wrong.
                let text = error.to_string();
                let last = text.lines().last().unwrap_or_default();
                Err(format!("a regular expression, found `{written}`: {}", last.strip_prefix("error: ").unwrap_or(last)))
            }
        }
    }

    pub fn written(&self) -> &str {
        &self.written
    }

    pub fn compiled(&self) -> &regex::Regex {
        &self.compiled
    }
}

impl PartialEq for WrittenRegex {
    fn eq(&self, other: &Self) -> bool {
        self.written == other.written
    }
}

impl Eq for WrittenRegex {}

forms! {
    WrittenRegex: "a regular expression, as \"<text>\\\\n\"";
    word<E> |pattern| WrittenRegex::new(pattern).map_err(|what| E::custom(format!("expected {what}")));
}

/// The modules that a key of an adapter's settings names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModuleSet {
    /// Every linear module of the decoder layers.
    AllLinear,
    /// Modules by whole names, or by what stands behind a dot of a name.
    Names(Vec<String>),
    /// Modules whose whole names an expression matches, as `model.layers.3.mlp.up_proj`.
    Matching(WrittenRegex),
}

impl ModuleSet {
    pub const NONE: Self = Self::Names(Vec::new());

    /// Modules whose whole names an expression matches; the error says in one line what is wrong.
    pub fn matching(written: &str) -> Result<Self, String> {
        WrittenRegex::matched_as(written, &format!("^(?:{written})$")).map(Self::Matching)
    }

    /// Whether it names a module, by its whole name; what the linears of the layers are, it does not know.
    pub fn names(&self, module: &str) -> bool {
        match self {
            Self::AllLinear => false,
            Self::Names(names) => names.iter().any(|name| is_named(module, name)),
            Self::Matching(regex) => regex.compiled.is_match(module),
        }
    }

    /// Each entry as a set of its own.
    pub fn entries(&self) -> Vec<Self> {
        match self {
            Self::Names(names) => names.iter().map(|name| Self::Names(vec![name.clone()])).collect(),
            whole => vec![whole.clone()],
        }
    }
}

/// Whether `name` is a module's whole name or the end of it, from behind a dot.
pub fn is_named(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

impl Default for ModuleSet {
    fn default() -> Self {
        Self::NONE
    }
}

/// What stands in recipes, and in PEFT's files.
impl Serialize for ModuleSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Names(names) => names.serialize(serializer),
            other => serializer.serialize_str(&other.to_string()),
        }
    }
}

/// `all-linear`, `q_proj, v_proj`, the expression, or `[]`.
impl fmt::Display for ModuleSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllLinear => f.write_str("all-linear"),
            Self::Names(names) if names.is_empty() => f.write_str("[]"),
            Self::Names(names) => f.write_str(&names.join(", ")),
            Self::Matching(regex) => f.write_str(regex.written()),
        }
    }
}

impl RecipeValue for ModuleSet {
    const WORDS: Spellings = &[("all-linear", &["all", "all_linear"])];

    fn takes(_: Option<&str>) -> String {
        "an array of names, or a regular expression".to_owned()
    }

    fn checked(self, document: &Document, key: &str) -> Checked<Self> {
        let is_excluded = key.ends_with("exclude_modules");
        if is_excluded && self == Self::AllLinear {
            let message = format!("`{key}` is all of `target_modules`");
            return document.refuse(key, message, "write the names of some, as `[\"q_proj\"]`");
        }
        if let Self::Names(names) = &self {
            let hint = "write `\"all-linear\"`, or names as `[\"q_proj\", \"v_proj\"]`";
            document.distinct(key, names, usize::from(!is_excluded), if is_excluded { "name each module once" } else { hint })?;
        }
        Ok(self)
    }
}

forms! {
    ModuleSet: "`\"all-linear\"`, a regular expression, or an array of module names";
    word<E> |word| match word {
        "all-linear" => Ok(ModuleSet::AllLinear),
        // A whole name has dots, which a word without any sign matches nowhere: it is a slip of the pen.
        _ if word.contains(|sign: char| !sign.is_alphanumeric() && !matches!(sign, '_' | '-' | ' ')) => {
            ModuleSet::matching(word).map_err(|what| E::custom(format!("expected {what}")))
        }
        _ => Err(E::unknown_variant(word, &["all-linear", "[\"q_proj\", …]"])),
    };
    list |names: Vec<String>| ModuleSet::Names(names);
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODULE: &str = "model.layers.11.self_attn.q_proj";

    #[test]
    fn modules_are_named_whole_or_by_their_end_and_an_expression_matches_whole_names() {
        let names = |name: &str| ModuleSet::Names(vec!["v_proj".into(), name.into()]);
        for (set, is_in) in [
            (names("q_proj"), true),
            (names("11.self_attn.q_proj"), true),
            (names(MODULE), true),
            (names("proj"), false),
            (names("1.self_attn.q_proj"), false),
            (ModuleSet::matching(r".*\.q_proj").unwrap(), true),
            (ModuleSet::matching("q_proj").unwrap(), false),
            (ModuleSet::matching("model|.*k_proj").unwrap(), false),
        ] {
            assert_eq!(set.names(MODULE), is_in, "{set:?}");
        }
    }

    #[test]
    fn what_is_no_regular_expression_is_refused_in_one_line() {
        assert_eq!(WrittenRegex::new("###(").unwrap_err(), "a regular expression, found `###(`: unclosed group");
        assert!(WrittenRegex::new("(?=a)").unwrap_err().contains("look-around"));
        assert!(ModuleSet::matching("[").unwrap_err().starts_with("a regular expression, found `[`: unclosed"));
    }
}
