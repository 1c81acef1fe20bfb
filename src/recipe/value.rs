//! Values that the keys of a recipe have: how they are read, checked and written, and what the reference calls them.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Debug;
use std::hash::Hash;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

use super::diagnose::Checked;
use super::read::{read, read_or_auto};
use super::tree::{Document, KeyValue};
use crate::files;

/// Words of a value, each with what other programs call it.
pub(super) type Spellings = &'static [(&'static str, &'static [&'static str])];

pub(super) trait RecipeValue: DeserializeOwned + Serialize {
    const WORDS: Spellings = &[];

    /// What the reference calls it; `number` is what the key's rule calls a number in it.
    fn takes(number: Option<&str>) -> String;

    /// The value in a recipe; `None` where the key is left out.
    fn to_value(&self) -> Option<Value> {
        Value::try_from(self).ok()
    }

    /// Refuses what its type alone cannot.
    fn checked(self, _document: &Document, _key: &str) -> Checked<Self> {
        Ok(self)
    }
}

/// What a number must be, beyond being one.
pub(super) struct KeyRule {
    pub(super) takes: &'static str,
    pub(super) expected: &'static str,
    pub(super) hint: &'static str,
    pub(super) is_fine: fn(f64) -> bool,
}

/// A number of things of which there is at least one.
pub(super) const COUNT: KeyRule = KeyRule {
    takes: "integer ≥ 1",
    expected: "at least 1",
    hint: "write 1 or more; to have the default, leave the key out",
    is_fine: |number| number >= 1.0,
};

/// A part of a whole.
pub(super) const PART: KeyRule = KeyRule {
    takes: "0 ≤ number < 1",
    expected: "at least 0 and less than 1",
    hint: "write a part of the whole, as 0.1 for 10%",
    is_fine: |number| (0.0..1.0).contains(&number),
};

pub(super) const fn positive(hint: &'static str) -> KeyRule {
    let is_fine = |number: f64| number > 0.0 && number.is_finite();
    KeyRule { takes: "number > 0", expected: "more than 0, and finite", hint, is_fine }
}

pub(super) const fn not_negative(hint: &'static str) -> KeyRule {
    let is_fine = |number: f64| number >= 0.0 && number.is_finite();
    KeyRule { takes: "number ≥ 0", expected: "0 or more, and finite", hint, is_fine }
}

impl KeyRule {
    /// Refuses a number, or the first of several, that breaks the rule. What is no number keeps it.
    pub(super) fn check(&self, document: &Document, key: &str, value: &Value) -> Checked<()> {
        let number = match value {
            Value::Integer(number) => *number as f64,
            Value::Float(number) => *number,
            Value::Array(items) => return items.iter().try_for_each(|item| self.check(document, key, item)),
            Value::Table(items) => return items.iter().try_for_each(|(_, item)| self.check(document, key, item)),
            _ => return Ok(()),
        };
        if (self.is_fine)(number) {
            return Ok(());
        }
        let message = format!("`{key}` must be {}, found {}", self.expected, shown(value));
        document.refuse(key, message, self.hint)
    }
}

/// A value as a person writes it: words without quotes, and floats with a point.
pub(super) fn shown(value: &Value) -> String {
    match value {
        Value::String(word) => word.clone(),
        Value::Float(number) => format!("{number:?}"),
        other => other.to_string(),
    }
}

/// What is read of a document whose keys are kvtune's own.
impl Document {
    pub(super) fn has(&self, key: &str) -> bool {
        self.root.entry(key).is_some()
    }

    /// Whether the command line says `key` (dotted) or something of it, in place of the recipe.
    pub(super) fn is_override(&self, key: &str) -> bool {
        fn is_said(entry: &KeyValue) -> bool {
            entry.spot.is_override() || entry.node.entries().iter().any(is_said)
        }
        self.root.entry(key).is_some_and(is_said)
    }

    /// The value of `key` (dotted), if it is written.
    pub(super) fn value<T: DeserializeOwned>(&self, key: &str) -> Checked<Option<T>> {
        self.root.entry(key).map(|entry| read(&entry.node, key, &self.source)).transpose()
    }

    /// The value of a key that may be left open, which is no value.
    pub(super) fn value_or_auto<T: DeserializeOwned>(&self, key: &str) -> Checked<Option<T>> {
        self.root.entry(key).map_or(Ok(None), |entry| read_or_auto(&entry.node, key, &self.source))
    }

    /// Refuses what stands at `key` (dotted); the caret stands below it, or below the table that it is missing from.
    pub(super) fn refuse<T>(&self, key: &str, message: String, hint: impl Into<String>) -> Checked<T> {
        Err(self.source.reject(self.root.spot_near(key), message, hint))
    }

    /// At least so many, and none twice.
    pub(super) fn distinct<T: Debug + Eq + Hash>(&self, key: &str, items: &[T], at_least: usize, hint: &str) -> Checked<()> {
        if items.len() < at_least {
            return self.refuse(key, format!("`{key}` must list at least {at_least}, found {}", items.len()), hint);
        }
        let mut seen = HashSet::new();
        match items.iter().find(|item| !seen.insert(*item)) {
            Some(item) => self.refuse(key, format!("`{key}` lists {item:?} twice"), hint),
            None => Ok(()),
        }
    }
}

/// The recipe's folder, without symbolic links where it exists.
fn folder_of(path: &Path) -> PathBuf {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    folder.canonicalize().unwrap_or_else(|_| files::absolute(folder))
}

/// Relative paths begin at the recipe's folder, and behind `--set` at the shell's.
impl RecipeValue for PathBuf {
    fn takes(_: Option<&str>) -> String {
        "path".to_owned()
    }

    fn to_value(&self) -> Option<Value> {
        Some(Value::String(self.to_string_lossy().into_owned()))
    }

    fn checked(self, document: &Document, key: &str) -> Checked<Self> {
        if self.as_os_str().is_empty() {
            let message = format!("`{key}` must be a path, found \"\"");
            let hint = "write a path, relative to the recipe's folder; behind `--set`, to the shell's";
            return document.refuse(key, message, hint);
        }
        let begin = folder_of(if document.is_override(key) { Path::new("") } else { &document.source.path });
        let mut folder = begin.as_path();
        let mut rest = self.as_path();
        // The folder has no symbolic links, so that its own name and `..` cancel out.
        while let Ok(shorter) = rest.strip_prefix("..") {
            (folder, rest) = (folder.parent().unwrap_or(folder), shorter);
        }
        let path = folder.join(rest);
        if path.to_str().is_none() {
            let message = format!("`{key}` leads to a path that is not UTF-8");
            return document.refuse(key, message, "move the recipe into another folder");
        }
        Ok(path)
    }
}

/// A key without a value is left out.
impl<T: RecipeValue> RecipeValue for Option<T> {
    const WORDS: Spellings = T::WORDS;

    fn takes(number: Option<&str>) -> String {
        T::takes(number)
    }

    fn to_value(&self) -> Option<Value> {
        self.as_ref().and_then(T::to_value)
    }

    fn checked(self, document: &Document, key: &str) -> Checked<Self> {
        self.map(|value| value.checked(document, key)).transpose()
    }
}

/// Numbers by names of the user's.
impl<T: RecipeValue> RecipeValue for BTreeMap<String, T> {
    fn takes(number: Option<&str>) -> String {
        format!("table, each value: {}", T::takes(number))
    }
}

/// Types that need nothing but a name.
macro_rules! plain_values {
    ($($type:ty: |$number:pat_param| $takes:expr;)+) => {$(
        impl RecipeValue for $type {
            fn takes($number: Option<&str>) -> String {
                $takes.to_owned()
            }
        }
    )+};
}

plain_values! {
    bool: |_| "boolean";
    usize: |number| number.unwrap_or("integer ≥ 0");
    u64: |number| number.unwrap_or("integer ≥ 0");
    f64: |number| number.unwrap_or("number");
    (f64, f64): |number| format!("array of two numbers, each {}", number.unwrap_or("a number"));
    String: |_| "string";
    Table: |_| "table";
    Vec<String>: |_| "array of strings";
    Vec<u32>: |_| "array of integers";
    Vec<usize>: |_| "array of integers";
}
