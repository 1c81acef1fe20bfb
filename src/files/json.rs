//! JSON as data formats mean it: parsers differ on what a key given twice says, so it is refused.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::path::Path;

use serde::de::{DeserializeOwned, DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserializer, Serialize};
use serde_json::error::Category;
use serde_json::{Map, Number, Value};

use super::{FileKind, read_bytes};
use crate::units::{Fault, FaultKind, abridged, quoted};

const MAX_KEY: usize = 1 << 16;

pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, Fault> {
    read_json_as(path, FileKind::Settings)
}

pub fn read_json_as<T: DeserializeOwned>(path: &Path, kind: FileKind) -> Result<T, Fault> {
    parse_json(path, &read_bytes(path, kind)?, kind)
}

pub fn parse_json<T: DeserializeOwned>(path: &Path, bytes: &[u8], kind: FileKind) -> Result<T, Fault> {
    check_keys(bytes, kind.max_values()).map_err(|reason| not_json(path, reason))?;
    serde_json::from_slice(bytes).map_err(|error| not_json(path, error))
}

/// The fault of a file that is no JSON, or JSON of something else.
pub fn not_json(path: &Path, reason: impl fmt::Display) -> Fault {
    let message = format!("`{}` is not valid JSON: {}", abridged(path.display()), abridged(reason));
    Fault::data(message, "look at the place that the parser names, or fetch the file again").of_kind(FaultKind::Damaged)
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
    let (left, last) = (Cell::new(max_values), RefCell::new(String::new()));
    let too_many = format!("more than {max_values} values");
    let keys = StrictJson { left: &left, too_many: &too_many, last_key: Some(&last), each: None };
    let checked = keys.deserialize(&mut parser).and_then(|_| parser.end());
    checked.map_err(|error| match &*last.borrow() {
        // Of a number that is none nobody sees what it is.
        key if key.is_empty() || error.classify() != Category::Syntax => error.to_string(),
        key => format!("{error}, behind the key `{}`", quoted(key)),
    })
}

/// Reads JSON values without a key that stands twice, and no more of them than are allowed.
#[derive(Clone, Copy)]
pub struct StrictJson<'a> {
    /// Values that may still come.
    pub left: &'a Cell<usize>,
    pub too_many: &'a str,
    /// The last key of a document of which only the keys are looked at: no value is kept.
    last_key: Option<&'a RefCell<String>>,
    /// Whom the items of the outermost list are handed to, none of which is kept then; false ends the walk.
    each: Option<&'a RefCell<&'a mut dyn FnMut(Value) -> bool>>,
}

impl<'a> StrictJson<'a> {
    /// For documents whose values are kept; `left` may be set anew for each.
    pub fn new(left: &'a Cell<usize>, too_many: &'a str) -> Self {
        Self { left, too_many, last_key: None, each: None }
    }

    pub fn parse(self, text: &str) -> serde_json::Result<Value> {
        let mut parser = serde_json::Deserializer::from_str(text);
        let value = self.deserialize(&mut parser)?;
        parser.end().map(|()| value)
    }

    /// Hands over the items of a list, one at a time, until `each` says false, which comes back as an error of the parser's.
    pub fn each_item<'de, D: Deserializer<'de>>(self, parser: D, each: &mut dyn FnMut(Value) -> bool) -> Result<(), D::Error> {
        let Self { left, too_many, last_key, .. } = self;
        let mut hand_over = |value| each(value);
        let each = RefCell::new(&mut hand_over as &mut dyn FnMut(Value) -> bool);
        parser.deserialize_seq(StrictJson { left, too_many, last_key, each: Some(&each) }).map(drop)
    }
}

impl<'de> DeserializeSeed<'de> for StrictJson<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        let left = self.left.get().checked_sub(1);
        self.left.set(left.ok_or_else(|| D::Error::custom(self.too_many))?);
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for StrictJson<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("a number that is none"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(if self.last_key.is_some() { Value::Null } else { value.into() })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = items.next_element_seed(Self { each: None, ..self })? {
            if let Some(each) = self.each {
                if !each.borrow_mut()(value) {
                    return Err(A::Error::custom("the walk was ended"));
                }
            } else if self.last_key.is_none() {
                values.push(value);
            }
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if fields.contains_key(&key) {
                return Err(A::Error::custom(format!("the key `{}` stands twice", quoted(key))));
            }
            if let Some(last) = self.last_key {
                if key.len() > MAX_KEY {
                    return Err(A::Error::custom(format!("a key of {} bytes, `{}`", key.len(), quoted(&key))));
                }
                key.clone_into(&mut last.borrow_mut());
            }
            fields.insert(key, entries.next_value_seed(self)?);
        }
        Ok(if self.last_key.is_some() { Value::Null } else { Value::Object(fields) })
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
        let error = parse_json::<serde_json::Value>(Path::new("x"), deep.as_bytes(), FileKind::Settings).unwrap_err();
        assert!(error.to_string().starts_with("`x` is not valid JSON"), "{error}");
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
