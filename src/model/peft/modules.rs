//! Which modules a setting of an adapter means: PEFT's rules for names and regular expressions.

use std::fmt;

use regex::Regex;
use serde_json::{Map, Value};

/// Values for the modules whose names match a regular expression. The first that matches counts, so their order is kept.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModulePatterns<T>(Vec<(ModuleRegex, T)>);

/// The modules that a key of the settings names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModuleSet {
    /// Every linear of the layers.
    AllLinear,
    /// Modules by whole names, or by what stands behind a dot of a name.
    Names(Vec<String>),
    /// Modules whose whole names an expression matches.
    Matching(ModuleRegex),
}

/// How PEFT finds the number of a layer in a module's name: behind the first of these names of lists that matches.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerLists(Vec<ModuleRegex>);

impl LayerLists {
    /// Lists by regular expressions. What any model has is the same as nothing.
    pub fn new(names: Vec<String>) -> Result<Self, String> {
        if names == ["layers"] {
            return Ok(Self::default());
        }
        let compile = |name: String| {
            let compiled = ModuleRegex::new(name.clone(), &format!(r"^.*\.(?:{name})\.(\d+)\."))?;
            // PEFT takes the first group for the number.
            let has_groups = compiled.compiled.captures_len() > 2;
            if has_groups { Err(format!("a regular expression without groups, found `{name}`")) } else { Ok(compiled) }
        };
        names.into_iter().map(compile).collect::<Result<_, _>>().map(Self)
    }

    /// The names as they were written; empty where the usual name holds.
    pub fn names(&self) -> Vec<String> {
        self.0.iter().map(|name| name.written.clone()).collect()
    }

    pub fn contain(&self, layers: &[usize], module: &str, layer: usize) -> bool {
        let number = |list: &ModuleRegex| list.compiled.captures(module)?.get(1)?.as_str().parse().ok();
        let found = if self.0.is_empty() { Some(layer) } else { self.0.iter().find_map(number) };
        found.is_some_and(|number| layers.contains(&number))
    }
}

/// A regular expression with the text it was written as.
#[derive(Clone, Debug)]
pub struct ModuleRegex {
    written: String,
    compiled: Regex,
}

impl ModuleRegex {
    pub fn written(&self) -> &str {
        &self.written
    }

    /// Whether it means a module, by its whole name.
    pub fn is_match(&self, module: &str) -> bool {
        self.compiled.is_match(module)
    }

    /// Compiles what PEFT makes of `written`; the error says in one line what is wrong.
    fn new(written: String, as_matched: &str) -> Result<Self, String> {
        match Regex::new(as_matched) {
            Ok(compiled) => Ok(Self { written, compiled }),
            Err(error) => {
                // The crate draws the pattern with a caret in several lines; the last says what is wrong.
                let text = error.to_string();
                let last = text.lines().last().unwrap_or_default();
                Err(format!("a regular expression, found `{written}`: {}", last.strip_prefix("error: ").unwrap_or(last)))
            }
        }
    }
}

impl PartialEq for ModuleRegex {
    fn eq(&self, other: &Self) -> bool {
        self.written == other.written
    }
}

impl Eq for ModuleRegex {}

impl<T: Copy> ModulePatterns<T> {
    /// Values by pattern; a pattern means a module whose name it matches to the end, from its start or from behind a dot.
    pub fn new(pairs: impl IntoIterator<Item = (String, T)>) -> Result<Self, String> {
        let compile = |(written, value): (String, T)| {
            let as_matched = format!(r"^(?:(.*\.)?({written})$)");
            Ok((ModuleRegex::new(written, &as_matched)?, value))
        };
        pairs.into_iter().map(compile).collect::<Result<_, String>>().map(Self)
    }

    /// The value for a module, by its whole name.
    pub fn get(&self, module: &str) -> Option<T> {
        self.0.iter().find(|(regex, _)| regex.is_match(module)).map(|(_, value)| *value)
    }

    /// A pattern, as it was written, that means none of some modules.
    pub fn idle(&self, modules: &[String]) -> Option<&str> {
        let is_idle = |regex: &ModuleRegex| !modules.iter().any(|module| regex.is_match(module));
        self.0.iter().find(|(regex, _)| is_idle(regex)).map(|(regex, _)| regex.written())
    }

    pub fn map(&self, value: impl Fn(T) -> T) -> Self {
        Self(self.0.iter().map(|(regex, of)| (regex.clone(), value(*of))).collect())
    }

    /// What stands in PEFT's files, of values as `number` writes them.
    pub(super) fn to_value(&self, number: impl Fn(T) -> Value) -> Value {
        self.iter().map(|(pattern, value)| (pattern.to_owned(), number(value))).collect::<Map<_, _>>().into()
    }

    /// The patterns as they were written, with their values, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, T)> {
        self.0.iter().map(|(regex, value)| (regex.written.as_str(), *value))
    }
}

/// What stands in PEFT's files.
impl<T: Copy + fmt::Display> fmt::Display for ModulePatterns<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs: Vec<String> = self.iter().map(|(pattern, value)| format!("{pattern:?}: {value}")).collect();
        write!(f, "{{{}}}", pairs.join(", "))
    }
}

impl Default for ModuleSet {
    fn default() -> Self {
        Self::Names(Vec::new())
    }
}

/// What stands in PEFT's files.
impl fmt::Display for ModuleSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_value().fmt(f)
    }
}

impl ModuleSet {
    /// Modules whose whole names an expression matches; the error says in one line what is wrong.
    pub fn matching(written: &str) -> Result<Self, String> {
        ModuleRegex::new(written.to_owned(), &format!("^(?:{written})$")).map(Self::Matching)
    }

    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Names(names) if names.is_empty())
    }

    /// Whether it names a module, by its whole name; what the linears of the layers are, it does not know.
    pub fn names(&self, module: &str) -> bool {
        match self {
            Self::AllLinear => false,
            Self::Names(names) => names.iter().any(|name| is_named(module, name)),
            Self::Matching(regex) => regex.is_match(module),
        }
    }

    /// What stands at a key: the list is empty where that is nothing. `Err` says what was expected.
    pub(super) fn read(value: &Value, key: &str, forms: &str) -> Result<Self, String> {
        match value {
            Value::Null | Value::Bool(false) => Ok(Self::default()),
            Value::String(text) if text.is_empty() => Ok(Self::default()),
            // As in PEFT, which takes a single name for an expression, too.
            Value::String(text) => Self::matching(text).map_err(|what| format!("`{key}` as {what}")),
            _ => match serde_json::from_value(value.clone()) {
                Ok(names) => Ok(Self::Names(names)),
                Err(_) => Err(format!("`{key}` as {forms}, found {value}")),
            },
        }
    }

    pub(super) fn to_value(&self) -> Value {
        match self {
            Self::AllLinear => "all-linear".into(),
            Self::Names(names) => names.clone().into(),
            Self::Matching(regex) => regex.written.clone().into(),
        }
    }
}

/// Whether `name` is a module's whole name or the end of it, from behind a dot.
pub(in crate::model) fn is_named(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODULE: &str = "model.layers.11.self_attn.q_proj";

    fn patterns(written: &[&str]) -> ModulePatterns<usize> {
        ModulePatterns::new(written.iter().enumerate().map(|(i, &pattern)| (pattern.to_owned(), i))).unwrap()
    }

    #[test]
    fn a_pattern_matches_to_the_end_from_the_start_or_behind_a_dot() {
        for pattern in [
            "q_proj",
            "self_attn.q_proj",
            "[qk]_proj",
            MODULE,
            "^model.layers.11.self_attn.q_proj",
            ".*q_proj",
            r"layers\.(1|11)\..*",
        ] {
            assert_eq!(patterns(&[pattern]).get(MODULE), Some(0), "{pattern}");
        }
        for pattern in ["proj", "q_pro", "1.self_attn.q_proj", "^q_proj", "layers.1.self_attn.q_proj", "self_attn"] {
            assert_eq!(patterns(&[pattern]).get(MODULE), None, "{pattern}");
        }
    }

    #[test]
    fn the_first_pattern_that_matches_counts() {
        assert_eq!(patterns(&["v_proj", "q_proj", ".*q_proj"]).get(MODULE), Some(1));
        assert_eq!(patterns(&["v_proj", ".*q_proj", "q_proj"]).get(MODULE), Some(1));
        assert_eq!(ModulePatterns::<usize>::default().get(MODULE), None);
    }

    #[test]
    fn names_are_excluded_whole_or_by_their_end_and_an_expression_matches_whole_names() {
        let names = |name: &str| ModuleSet::Names(vec!["v_proj".into(), name.into()]);
        for (excluded, is_in) in [
            (names("q_proj"), true),
            (names("11.self_attn.q_proj"), true),
            (names(MODULE), true),
            (names("proj"), false),
            (names("1.self_attn.q_proj"), false),
            (ModuleSet::matching(r".*\.q_proj").unwrap(), true),
            (ModuleSet::matching("q_proj").unwrap(), false),
            (ModuleSet::matching("model|.*k_proj").unwrap(), false),
        ] {
            assert_eq!(excluded.names(MODULE), is_in, "{excluded:?}");
        }
    }

    #[test]
    fn what_is_no_expression_is_refused_in_one_line() {
        for error in [
            ModulePatterns::new([("q_proj(".to_owned(), 1)]).unwrap_err(),
            ModulePatterns::new([("(?!q)".to_owned(), 1)]).unwrap_err(),
            ModuleSet::matching("[").unwrap_err(),
        ] {
            assert!(error.starts_with("a regular expression, found `") && !error.contains('\n'), "{error}");
        }
    }
}
