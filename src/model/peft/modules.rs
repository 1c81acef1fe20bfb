//! Values of some modules, by PEFT's rules for regular expressions.

use std::fmt;

use serde_json::{Map, Value};

use crate::recipe::WrittenRegex;

/// Values for the modules whose names match a regular expression. The first that matches counts, so their order is kept.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModulePatterns<T>(Vec<(WrittenRegex, T)>);

/// How PEFT finds the number of a layer in a module's name: behind the first of these names of lists that matches.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerLists(Vec<WrittenRegex>);

impl LayerLists {
    /// Lists by regular expressions. What any model has is the same as nothing.
    pub fn new(names: Vec<String>) -> Result<Self, String> {
        if names == ["layers"] {
            return Ok(Self::default());
        }
        let compile = |name: String| {
            let compiled = WrittenRegex::matched_as(&name, &format!(r"^.*\.(?:{name})\.(\d+)\."))?;
            // PEFT takes the first group for the number.
            let has_groups = compiled.compiled().captures_len() > 2;
            if has_groups { Err(format!("a regular expression without groups, found `{name}`")) } else { Ok(compiled) }
        };
        names.into_iter().map(compile).collect::<Result<_, _>>().map(Self)
    }

    /// The names as they were written; empty where the usual name holds.
    pub fn names(&self) -> Vec<String> {
        self.0.iter().map(|name| name.written().to_owned()).collect()
    }

    pub fn contain(&self, layers: &[usize], module: &str, layer: usize) -> bool {
        let number = |list: &WrittenRegex| list.compiled().captures(module)?.get(1)?.as_str().parse().ok();
        let found = if self.0.is_empty() { Some(layer) } else { self.0.iter().find_map(number) };
        found.is_some_and(|number| layers.contains(&number))
    }
}

impl<T: Copy> ModulePatterns<T> {
    /// Values by pattern; a pattern means a module whose name it matches to the end, from its start or from behind a dot.
    pub fn new(pairs: impl IntoIterator<Item = (String, T)>) -> Result<Self, String> {
        let compile = |(written, value): (String, T)| {
            let as_matched = format!(r"^(?:(.*\.)?({written})$)");
            Ok((WrittenRegex::matched_as(&written, &as_matched)?, value))
        };
        pairs.into_iter().map(compile).collect::<Result<_, String>>().map(Self)
    }

    /// The value for a module, by its whole name.
    pub fn get(&self, module: &str) -> Option<T> {
        self.0.iter().find(|(regex, _)| regex.compiled().is_match(module)).map(|(_, value)| *value)
    }

    /// A pattern, as it was written, that means none of some modules, and is none of `others`.
    pub fn idle(&self, modules: &[String], others: &Self) -> Option<&str> {
        let is_other = |regex: &WrittenRegex| others.0.iter().any(|(other, _)| other == regex);
        let is_idle = |regex: &WrittenRegex| !modules.iter().any(|module| regex.compiled().is_match(module));
        self.0.iter().map(|(regex, _)| regex).find(|regex| is_idle(regex) && !is_other(regex)).map(WrittenRegex::written)
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
        self.0.iter().map(|(regex, value)| (regex.written(), *value))
    }
}

/// What stands in PEFT's files.
impl<T: Copy + fmt::Display> fmt::Display for ModulePatterns<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs: Vec<String> = self.iter().map(|(pattern, value)| format!("{pattern:?}: {value}")).collect();
        write!(f, "{{{}}}", pairs.join(", "))
    }
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
    fn what_is_no_expression_is_refused_in_one_line() {
        for error in [
            ModulePatterns::new([("q_proj(".to_owned(), 1)]).unwrap_err(),
            ModulePatterns::new([("(?!q)".to_owned(), 1)]).unwrap_err(),
        ] {
            assert!(error.starts_with("a regular expression, found `") && !error.contains('\n'), "{error}");
        }
    }
}
