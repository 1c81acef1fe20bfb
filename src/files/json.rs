//! JSON as data formats mean it: parsers differ on what a key given twice says, so it is refused.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use serde::de::{DeserializeOwned, DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserializer, Serialize};
use serde_json::error::Category;

use super::{FileKind, FilesError, read_bytes};
use crate::units::quoted;

/// Bytes of the longest key.
const MAX_KEY: usize = 1 << 16;

/// Reads a JSON file of settings.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, FilesError> {
    read_json_as(path, FileKind::Settings)
}

/// Reads a JSON file of a kind that may be larger.
pub fn read_json_as<T: DeserializeOwned>(path: &Path, kind: FileKind) -> Result<T, FilesError> {
    parse_json(path, &read_bytes(path, kind)?, kind)
}

/// Parses JSON that came from `path`.
pub fn parse_json<T: DeserializeOwned>(path: &Path, bytes: &[u8], kind: FileKind) -> Result<T, FilesError> {
    let wrong = |reason: String| FilesError::Json { path: path.to_path_buf(), reason };
    check_keys(bytes, kind.max_values()).map_err(wrong)?;
    serde_json::from_slice(bytes).map_err(|error| wrong(error.to_string()))
}

/// JSON for people: indented by 2, a newline at the end.
pub fn to_json<T: Serialize>(value: &T) -> Vec<u8> {
    // Our own types have string keys and no failing serialiser, the only two things that can go wrong here.
    let mut bytes = serde_json::to_vec_pretty(value).expect("the type serialises");
    bytes.push(b'\n');
    bytes
}

/// Fails on a key that stands twice in one object, at any depth, and on more than `max_values` values, which would take many times the
/// memory of their text. The message names the key behind which it goes wrong.
pub(super) fn check_keys(bytes: &[u8], max_values: usize) -> Result<(), String> {
    let mut parser = serde_json::Deserializer::from_slice(bytes);
    let last = RefCell::new(String::new());
    let keys = UniqueKeys { left: &Cell::new(max_values), max_values, last: &last };
    let checked = keys.deserialize(&mut parser).and_then(|()| parser.end());
    checked.map_err(|error| match &*last.borrow() {
        // Of a number that is none nobody sees what it is.
        key if key.is_empty() || error.classify() != Category::Syntax => error.to_string(),
        key => format!("{error}, behind the key `{}`", quoted(key)),
    })
}

/// Any JSON value, of which only the keys are looked at.
#[derive(Clone, Copy)]
struct UniqueKeys<'a> {
    /// Values that may still come.
    left: &'a Cell<usize>,
    max_values: usize,
    last: &'a RefCell<String>,
}

impl<'de> DeserializeSeed<'de> for UniqueKeys<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        let left = self.left.get().checked_sub(1);
        self.left.set(left.ok_or_else(|| D::Error::custom(format!("more than {} values", self.max_values)))?);
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for UniqueKeys<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            if key.len() > MAX_KEY {
                return Err(A::Error::custom(format!("a key of {} bytes, `{}`", key.len(), quoted(key))));
            }
            if seen.contains(&key) {
                return Err(A::Error::custom(format!("the key `{}` stands twice", quoted(key))));
            }
            key.clone_into(&mut self.last.borrow_mut());
            seen.insert(key);
            map.next_value_seed(self)?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element_seed(self)?.is_some() {}
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }
    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }
    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }
    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }
    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_given_twice_is_refused_at_any_depth() {
        let path = Path::new("x.json");
        for twice in [r#"{"a": 1, "a": 2}"#, r#"{"b": [1, {"a": null, "c": "s", "a": 2.5}]}"#, r#"{"a": 1, "\u0061": 2}"#] {
            let error = parse_json::<serde_json::Value>(path, twice.as_bytes(), FileKind::Settings).unwrap_err();
            assert!(error.to_string().contains("the key `a` stands twice"), "{error}");
        }
        let value: serde_json::Value = parse_json(path, br#"{"a": {"a": true}, "b": {"a": -1}}"#, FileKind::Settings).unwrap();
        assert_eq!(value["b"]["a"], -1);
        assert_eq!(to_json(&value), b"{\n  \"a\": {\n    \"a\": true\n  },\n  \"b\": {\n    \"a\": -1\n  }\n}\n");
    }

    #[test]
    fn deep_nesting_is_an_error_and_no_crash() {
        let deep = "[".repeat(100_000);
        assert!(matches!(
            parse_json::<serde_json::Value>(Path::new("x"), deep.as_bytes(), FileKind::Settings),
            Err(FilesError::Json { .. })
        ));
    }

    #[test]
    fn values_are_counted_before_they_take_memory() {
        let many = |count: usize| [b"[".to_vec(), b"0,".repeat(count - 2), b"0]".to_vec()].concat();
        let limit = FileKind::Settings.max_values();
        assert!(parse_json::<serde_json::Value>(Path::new("x"), &many(limit), FileKind::Settings).is_ok());
        let error = parse_json::<serde_json::Value>(Path::new("x"), &many(limit + 1), FileKind::Settings).unwrap_err();
        assert!(error.to_string().contains("more than 1048576 values"), "{error}");
    }
}
