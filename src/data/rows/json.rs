//! JSON of which no key of an object counts twice: of two values one would be lost without a word. And of no more values than a line of
//! its length has reason to hold: each takes many times its bytes.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::units::quoted;

/// Reads values without a key that stands twice.
#[derive(Clone, Copy)]
pub(super) struct StrictJson<'a> {
    /// Values that may still come.
    left: &'a Cell<usize>,
}

impl<'a> StrictJson<'a> {
    /// Of a line or record that may have `max_bytes` bytes; counts in `left`.
    pub(super) fn new(left: &'a Cell<usize>, max_bytes: usize) -> Self {
        let json = Self { left };
        json.begin(max_bytes);
        json
    }

    /// The next line or record begins.
    pub(super) fn begin(self, max_bytes: usize) {
        const FEW: usize = 1 << 16;
        self.left.set((max_bytes / BYTES_PER_VALUE).max(FEW));
    }

    /// The value of a line.
    pub(super) fn parse(self, text: &str) -> serde_json::Result<Value> {
        let mut parser = serde_json::Deserializer::from_str(text);
        let value = self.deserialize(&mut parser)?;
        parser.end().map(|()| value)
    }
}

/// A line may be as long as this for each of its values.
const BYTES_PER_VALUE: usize = 16;

impl<'de> DeserializeSeed<'de> for StrictJson<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        let too_many = || D::Error::custom("more values than one for each 16 bytes that `data.max_line_bytes` allows");
        self.left.set(self.left.get().checked_sub(1).ok_or_else(too_many)?);
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
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = items.next_element_seed(self)? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if fields.contains_key(&key) {
                return Err(A::Error::custom(format!("the key `{}` stands twice", quoted(key))));
            }
            fields.insert(key, entries.next_value_seed(self)?);
        }
        Ok(Value::Object(fields))
    }
}
