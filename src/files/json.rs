//! JSON as data formats mean it: parsers differ on what a key given twice says, so it is refused.

use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use serde::de::{DeserializeOwned, Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::FilesError;

/// Larger JSON files than this (1 GiB) are not read into memory.
const LIMIT: u64 = 1 << 30;

/// Reads a JSON file.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, FilesError> {
    let size = std::fs::metadata(path).map_err(FilesError::io("open", path))?.len();
    if size > LIMIT {
        return Err(FilesError::Json { path: path.to_path_buf(), reason: format!("{size} bytes, expected at most {LIMIT}") });
    }
    let bytes = std::fs::read(path).map_err(FilesError::io("read", path))?;
    parse_json(path, &bytes)
}

/// Parses JSON that came from `path`.
pub fn parse_json<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T, FilesError> {
    let wrong = |e: serde_json::Error| FilesError::Json { path: path.to_path_buf(), reason: e.to_string() };
    check_keys(bytes).map_err(wrong)?;
    serde_json::from_slice(bytes).map_err(wrong)
}

/// JSON for people: indented by 2, a newline at the end.
pub fn to_json<T: Serialize>(value: &T) -> Vec<u8> {
    // Our own types have string keys and no failing serialiser, the only two things that can go wrong here.
    let mut bytes = serde_json::to_vec_pretty(value).expect("the type serialises");
    bytes.push(b'\n');
    bytes
}

/// Fails on a key that stands twice in one object, at any depth.
pub(super) fn check_keys(bytes: &[u8]) -> serde_json::Result<()> {
    serde_json::from_slice::<UniqueKeys>(bytes).map(|_| ())
}

/// Any JSON value, of which only the keys are looked at.
struct UniqueKeys;

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueKeysVisitor)
    }
}

struct UniqueKeysVisitor;

impl<'de> Visitor<'de> for UniqueKeysVisitor {
    type Value = UniqueKeys;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueKeys, A::Error> {
        let mut seen = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            if seen.contains(&key) {
                return Err(A::Error::custom(format!("the key `{key}` stands twice")));
            }
            seen.insert(key);
            map.next_value::<UniqueKeys>()?;
        }
        Ok(UniqueKeys)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<UniqueKeys, A::Error> {
        while seq.next_element::<UniqueKeys>()?.is_some() {}
        Ok(UniqueKeys)
    }

    fn visit_unit<E>(self) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }
    fn visit_bool<E>(self, _: bool) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }
    fn visit_i64<E>(self, _: i64) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }
    fn visit_u64<E>(self, _: u64) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }
    fn visit_f64<E>(self, _: f64) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }
    fn visit_str<E>(self, _: &str) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_given_twice_is_refused_at_any_depth() {
        let path = Path::new("x.json");
        for twice in [r#"{"a": 1, "a": 2}"#, r#"{"b": [1, {"a": null, "c": "s", "a": 2.5}]}"#, r#"{"a": 1, "\u0061": 2}"#] {
            let error = parse_json::<serde_json::Value>(path, twice.as_bytes()).unwrap_err();
            assert!(error.to_string().contains("the key `a` stands twice"), "{error}");
        }
        let value: serde_json::Value = parse_json(path, br#"{"a": {"a": true}, "b": {"a": -1}}"#).unwrap();
        assert_eq!(value["b"]["a"], -1);
        assert_eq!(to_json(&value), b"{\n  \"a\": {\n    \"a\": true\n  },\n  \"b\": {\n    \"a\": -1\n  }\n}\n");
    }

    #[test]
    fn deep_nesting_is_an_error_and_no_crash() {
        let deep = "[".repeat(100_000);
        assert!(matches!(parse_json::<serde_json::Value>(Path::new("x"), deep.as_bytes()), Err(FilesError::Json { .. })));
    }
}
