//! From the tree to typed structs by serde. The errors know the key and the place, which serde alone would lose.

use std::fmt::Display;

use serde::de::value::{SeqDeserializer, StrDeserializer};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error, Expected, IntoDeserializer, MapAccess, Unexpected, Visitor,
};
use serde::forward_to_deserialize_any;

use super::auto::{AUTO, OR_AUTO};
use super::diagnose::{RecipeError, listed, suggest};
use super::schema;
use super::tree::{Node, NodeValue, RecipeSource, Spot};

/// Reads a table; `path` is the dotted key under which it stands (empty: the whole recipe).
pub(super) fn read<T: DeserializeOwned>(node: &Node, path: &str, source: &RecipeSource) -> Result<T, RecipeError> {
    T::deserialize(NodeReader(node)).map_err(|mut error| {
        error.path.extend(path.split('.').rev().filter(|part| !part.is_empty()).map(str::to_owned));
        error.path.reverse();
        error.into_recipe_error(source)
    })
}

/// The keys that a table knows, as serde's derive lists them.
pub(super) fn keys_of<T: DeserializeOwned>() -> &'static [&'static str] {
    match T::deserialize(AskForKeys) {
        Err(ReadError { problem: ReadProblem::Keys(keys), .. }) => keys,
        _ => &[],
    }
}

/// What is wrong, before it is known where.
#[derive(Debug)]
enum ReadProblem {
    UnknownKey {
        key: String,
        known: &'static [&'static str],
    },
    UnknownValue {
        value: String,
        known: Vec<&'static str>,
    },
    /// Not even a string where one of a few words is expected.
    NoWord {
        known: Vec<&'static str>,
        found: String,
    },
    WrongType {
        expected: String,
        found: String,
    },
    Missing(&'static str),
    Other(String),
    /// Not an error: the answer to [`AskForKeys`].
    Keys(&'static [&'static str]),
}

#[derive(Debug)]
struct ReadError {
    problem: ReadProblem,
    spot: Option<Spot>,
    /// From the inside out, as the error passes the tables.
    path: Vec<String>,
}

impl ReadError {
    fn new(problem: ReadProblem) -> Self {
        Self { problem, spot: None, path: Vec::new() }
    }

    fn at(mut self, spot: Spot) -> Self {
        self.spot.get_or_insert(spot);
        self
    }

    /// What was read could as well have been left open.
    fn or_auto(mut self) -> Self {
        match &mut self.problem {
            ReadProblem::UnknownValue { known, .. } | ReadProblem::NoWord { known, .. } => known.push(AUTO),
            ReadProblem::WrongType { expected, .. } => expected.push_str(", or `\"auto\"`"),
            _ => {}
        }
        self
    }

    /// One of a few words was expected.
    fn among(mut self, known: &[&'static str]) -> Self {
        if let ReadProblem::WrongType { found, .. } = self.problem {
            self.problem = ReadProblem::NoWord { known: known.to_vec(), found };
        }
        self
    }

    fn inside(mut self, key: &str) -> Self {
        self.path.push(key.to_owned());
        self
    }

    fn into_recipe_error(self, source: &RecipeSource) -> RecipeError {
        let path = self.path.join(".");
        let (message, hint) = match self.problem {
            ReadProblem::UnknownKey { key, known } => {
                let table = if path.is_empty() { "at the top level".to_owned() } else { format!("in `[{path}]`") };
                (format!("unknown key `{key}` {table}"), schema::suggest_key(&path, &key, known))
            }
            ReadProblem::UnknownValue { value, known } => {
                (format!("unknown value `{value}` for `{path}`"), suggest(&value, &known))
            }
            ReadProblem::NoWord { known, found } => {
                let words = listed(known);
                (format!("`{path}` must be {words}, found {found}"), format!("write {words}"))
            }
            ReadProblem::WrongType { expected, found } => {
                let hint = match expected.as_str() {
                    "a table" => format!("write `[{path}]`, and its keys below it"),
                    _ => format!("write {expected}"),
                };
                (format!("`{path}` must be {expected}, found {found}"), hint)
            }
            ReadProblem::Missing(key) => (format!("`{path}` lacks `{key}`"), format!("add `{key} = …` to `[{path}]`")),
            ReadProblem::Other(message) => (format!("`{path}`: {message}"), format!("correct `{path}`")),
            ReadProblem::Keys(keys) => (format!("`[{path}]` was not read"), format!("it knows {}", listed(keys.iter().copied()))),
        };
        source.reject(self.spot.unwrap_or_default(), message, hint)
    }
}

impl Display for ReadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.problem)
    }
}

impl std::error::Error for ReadError {}

impl Error for ReadError {
    fn custom<T: Display>(message: T) -> Self {
        Self::new(ReadProblem::Other(message.to_string()))
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let found = match found {
            Unexpected::Str(text) => format!("the string {text:?}"),
            Unexpected::Signed(number) => format!("`{number}`"),
            Unexpected::Unsigned(number) => format!("`{number}`"),
            Unexpected::Float(number) => format!("`{number:?}`"),
            Unexpected::Bool(value) => format!("`{value}`"),
            Unexpected::Seq => "an array".to_owned(),
            Unexpected::Map => "a table".to_owned(),
            other => other.to_string(),
        };
        let expected = match expected.to_string().as_str() {
            "usize" | "u64" | "u32" => "a whole number, 0 or more".to_owned(),
            "f64" => "a number".to_owned(),
            "a boolean" => "`true` or `false`".to_owned(),
            "a sequence" => "an array".to_owned(),
            text if text.starts_with("struct ") => "a table".to_owned(),
            text => text.to_owned(),
        };
        Self::new(ReadProblem::WrongType { expected, found })
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::invalid_type(found, expected)
    }

    fn invalid_length(len: usize, expected: &dyn Expected) -> Self {
        let expected = expected.to_string().replace("a tuple of size", "an array of length");
        Self::new(ReadProblem::WrongType { expected, found: format!("one of length {len}") })
    }

    fn unknown_field(field: &str, known: &'static [&'static str]) -> Self {
        Self::new(ReadProblem::UnknownKey { key: field.to_owned(), known })
    }

    fn unknown_variant(variant: &str, known: &'static [&'static str]) -> Self {
        Self::new(ReadProblem::UnknownValue { value: variant.to_owned(), known: known.to_vec() })
    }

    fn missing_field(field: &'static str) -> Self {
        Self::new(ReadProblem::Missing(field))
    }
}

/// Hands a value of the tree to serde.
struct NodeReader<'a>(&'a Node);

impl<'de> IntoDeserializer<'de, ReadError> for NodeReader<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for NodeReader<'de> {
    type Error = ReadError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match &self.0.value {
            NodeValue::String(text) | NodeValue::Datetime(text) => visitor.visit_borrowed_str(text),
            NodeValue::Integer(number) => visitor.visit_i64(*number),
            NodeValue::Float(number) => visitor.visit_f64(*number),
            NodeValue::Boolean(value) => visitor.visit_bool(*value),
            NodeValue::Array(items) => {
                let mut sequence = SeqDeserializer::new(items.iter().map(NodeReader));
                visitor.visit_seq(&mut sequence).and_then(|value| sequence.end().map(|()| value))
            }
            NodeValue::Table(entries) => visitor.visit_map(TableAccess { entries: entries.iter(), current: None }),
        }
        .map_err(|error| error.at(self.0.spot))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, ReadError> {
        match name {
            OR_AUTO if self.0.as_str() == Some(AUTO) => visitor.visit_unit(),
            OR_AUTO => visitor.visit_newtype_struct(self).map_err(ReadError::or_auto),
            _ => visitor.visit_newtype_struct(self),
        }
    }

    /// serde's derive would read an array as the fields in their order.
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        match &self.0.value {
            NodeValue::Array(_) => Err(ReadError::invalid_type(Unexpected::Seq, &"a table").at(self.0.spot)),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        match self.0.as_str() {
            Some(text) => {
                StrDeserializer::new(text).deserialize_enum(name, variants, visitor).map_err(|e: ReadError| e.at(self.0.spot))
            }
            // No enum of a recipe carries anything, so the visitor's own words for another type are the right ones.
            None => match self.deserialize_any(AWord) {
                Ok(never) => match never {},
                Err(error) => Err(error.among(variants)),
            },
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map identifier ignored_any
    }
}

/// Refuses what is not a string where one of a few words is expected.
struct AWord;

enum Never {}

impl Visitor<'_> for AWord {
    type Value = Never;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a word")
    }
}

struct TableAccess<'a> {
    entries: std::slice::Iter<'a, super::tree::KeyValue>,
    current: Option<&'a super::tree::KeyValue>,
}

impl<'de> MapAccess<'de> for TableAccess<'de> {
    type Error = ReadError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, ReadError> {
        self.current = self.entries.next();
        let Some(entry) = self.current else { return Ok(None) };
        seed.deserialize(StrDeserializer::new(&entry.key)).map(Some).map_err(|error: ReadError| error.at(entry.spot))
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, ReadError> {
        let entry = self.current.ok_or_else(|| ReadError::custom("a value was asked for before its key"))?;
        seed.deserialize(NodeReader(&entry.node)).map_err(|error| error.inside(&entry.key))
    }
}

/// Answers any struct by the list of its fields.
struct AskForKeys;

impl<'de> Deserializer<'de> for AskForKeys {
    type Error = ReadError;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, ReadError> {
        Err(ReadError::new(ReadProblem::Keys(&[])))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, ReadError> {
        Err(ReadError::new(ReadProblem::Keys(fields)))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}
