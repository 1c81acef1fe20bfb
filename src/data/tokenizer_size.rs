//! How many tokens and merges a `tokenizer.json` has, counted before it is taken: each takes some 400 bytes of memory.

use std::fmt;

use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Tokens and merges together. The largest that is known has 262 144 and 514 906.
const MAX_ENTRIES: usize = 1 << 20;

#[derive(Default, Deserialize)]
#[serde(default)]
struct TokenizerEntries {
    model: ModelEntries,
    added_tokens: Count,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ModelEntries {
    vocab: Count,
    merges: Count,
}

/// Entries of a list or a table; of `null` none.
#[derive(Default)]
struct Count(usize);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self(0))
    }
}

impl<'de> Visitor<'de> for Count {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list or a table")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<Self, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {
            self.0 += 1;
        }
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut entries: A) -> Result<Self, A::Error> {
        while entries.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            self.0 += 1;
        }
        Ok(self)
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }
}

/// `Err` says what is wrong with the file.
pub(super) fn check_size(bytes: &[u8]) -> Result<(), String> {
    let TokenizerEntries { model, added_tokens } = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    let found = model.vocab.0 + model.merges.0 + added_tokens.0;
    if found > MAX_ENTRIES { Err(format!("it has {found} tokens and merges, expected {MAX_ENTRIES} at most")) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_and_merges_count_wherever_they_stand() {
        let size = |vocab: &str, merges: usize, added: usize| {
            let list = |count: usize| vec!["0"; count].join(",");
            check_size(
                format!(r#"{{"added_tokens":[{}],"model":{{"vocab":{vocab},"merges":[{}]}}}}"#, list(added), list(merges))
                    .as_bytes(),
            )
        };
        assert_eq!(size(r#"{"a": 0}"#, MAX_ENTRIES - 2, 1), Ok(()));
        assert_eq!(size("null", MAX_ENTRIES, 0), Ok(()));
        for found in [size(r#"{"a": 0}"#, MAX_ENTRIES, 0), size("[[\"a\", -1.5]]", 0, MAX_ENTRIES)] {
            assert_eq!(found.unwrap_err(), format!("it has {} tokens and merges, expected 1048576 at most", MAX_ENTRIES + 1));
        }
        for wrong in [r#"{"model": {"vocab": {}, "vocab": {}}}"#, r#"{"model": 7}"#, "[", ""] {
            assert!(check_size(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
