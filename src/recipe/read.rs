//! From the tree to typed structs by serde. The errors know the key and the place, which serde alone would lose.

use std::fmt::Display;

use serde::de::value::{SeqDeserializer, StrDeserializer};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error, Expected, IntoDeserializer, MapAccess, Unexpected, Visitor,
};
use serde::forward_to_deserialize_any;

use super::diagnose::{Checked, one_of, suggest};
use super::tree::{Document, KeyValue, Node, NodeValue, RecipeSource, Spot};
use crate::units::{Fault, abridged, quoted};

/// The word for a value that is left to the planner.
pub(super) const AUTO: &str = "auto";

/// Reads a value; `path` is the dotted key under which it stands.
pub(super) fn read<T: DeserializeOwned>(node: &Node, path: &str, source: &RecipeSource) -> Checked<T> {
    T::deserialize(node).map_err(|error| error.at(node.spot, &node.value).into_fault(path, source))
}

/// Reads a value whose key takes the word `auto` too, which the errors then name.
pub(super) fn read_or_auto<T: DeserializeOwned>(node: &Node, path: &str, source: &RecipeSource) -> Checked<Option<T>> {
    if node.as_str() == Some(AUTO) {
        return Ok(None);
    }
    let read = T::deserialize(node).map(Some);
    read.map_err(|error| error.at(node.spot, &node.value).or_auto().into_fault(path, source))
}

/// Refuses a value that is none of the words that another room tells. Before it has told any, each will do.
pub(super) fn check_word(document: &Document, key: &str, known: Vec<&'static str>) -> Checked<()> {
    let Some(KeyValue { node, .. }) = document.root.entry(key) else { return Ok(()) };
    if known.is_empty() || node.as_str().is_some_and(|word| known.contains(&word)) {
        return Ok(());
    }
    let problem = ReadProblem::UnknownWord { word: node.as_str().map(str::to_owned), known };
    Err(ReadError::new(problem).at(node.spot, &node.value).into_fault(key, &document.source))
}

/// What is wrong, before it is known where.
#[derive(Debug)]
enum ReadProblem {
    UnknownKey {
        key: String,
        known: &'static [&'static str],
    },
    /// Without a word where the value is not even a string.
    UnknownWord {
        word: Option<String>,
        known: Vec<&'static str>,
    },
    WrongType {
        expected: String,
    },
    Missing(&'static str),
    Other(String),
}

#[derive(Debug)]
pub(super) struct ReadError {
    problem: ReadProblem,
    spot: Option<Spot>,
    /// The value in words, as `found` tells them.
    found: String,
    /// From the inside out, as the error passes the tables.
    path: Vec<String>,
}

impl ReadError {
    fn new(problem: ReadProblem) -> Self {
        Self { problem, spot: None, found: String::new(), path: Vec::new() }
    }

    /// The innermost value that the error passes is the one that is meant.
    fn at(mut self, spot: Spot, value: &NodeValue) -> Self {
        if self.spot.is_none() {
            self.spot = Some(spot);
            self.found = if self.found.is_empty() { found(value) } else { self.found };
        }
        self
    }

    /// What was read could as well have been left open.
    fn or_auto(mut self) -> Self {
        match &mut self.problem {
            ReadProblem::UnknownWord { known, .. } => known.push(AUTO),
            ReadProblem::WrongType { expected } => expected.push_str(", or `\"auto\"`"),
            _ => {}
        }
        self
    }

    fn inside(mut self, key: &str) -> Self {
        self.path.push(key.to_owned());
        self
    }

    /// The error of a value that stands at `path`.
    fn into_fault(self, path: &str, source: &RecipeSource) -> Fault {
        let path = abridged(self.path.iter().rev().fold(path.to_owned(), |path, key| format!("{path}.{key}")));
        let (spot, found) = (self.spot.unwrap_or_default(), self.found);
        let (message, hint) = match self.problem {
            ReadProblem::UnknownKey { key, known } => return source.unknown_key(spot, &path, &key, known),
            ReadProblem::UnknownWord { word: Some(word), known } => {
                (format!("unknown value `{}` for `{path}`", quoted(&word)), suggest(&word, &known))
            }
            ReadProblem::UnknownWord { word: None, known } => {
                let words = one_of(known);
                (format!("`{path}` must be {words}, found {found}"), format!("write {words}"))
            }
            ReadProblem::WrongType { expected } => {
                let hint = match expected.as_str() {
                    "a table" => format!("write `[{path}]`, and its keys below it"),
                    _ => format!("write {expected}"),
                };
                (format!("`{path}` must be {expected}, found {found}"), hint)
            }
            ReadProblem::Missing(key) => {
                let error = source.reject(spot, format!("`{path}` lacks `{key}`"), format!("add `{key} = …` to `[{path}]`"));
                // Whatever is taken out, it is still missing.
                return if let Spot::Text(start, _) = spot { error.carrying(Spot::Text(start, start)) } else { error };
            }
            ReadProblem::Other(message) => (format!("`{path}`: {message}"), format!("correct `{path}`")),
        };
        source.reject(spot, message, hint)
    }
}

fn found(value: &NodeValue) -> String {
    match value {
        NodeValue::String(text) => format!("the string \"{}\"", quoted(text)),
        NodeValue::Integer(number) => format!("`{number}`"),
        NodeValue::Float(number) => format!("`{number:?}`"),
        NodeValue::Boolean(value) => format!("`{value}`"),
        NodeValue::Array(_) => "an array".to_owned(),
        NodeValue::Table(_) => "a table".to_owned(),
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

    fn invalid_type(_: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let expected = match expected.to_string().as_str() {
            "usize" | "u64" | "u32" => "a whole number, 0 or more".to_owned(),
            "f64" => "a number".to_owned(),
            "a boolean" => "`true` or `false`".to_owned(),
            "a sequence" => "an array".to_owned(),
            "path string" => "a string".to_owned(),
            "a map" => "a table".to_owned(),
            text if text.starts_with("struct ") => "a table".to_owned(),
            text => text.to_owned(),
        };
        Self::new(ReadProblem::WrongType { expected })
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::invalid_type(found, expected)
    }

    fn invalid_length(len: usize, expected: &dyn Expected) -> Self {
        let expected = expected.to_string().replace("a tuple of size", "an array of length");
        Self { found: format!("one of length {len}"), ..Self::new(ReadProblem::WrongType { expected }) }
    }

    fn unknown_field(field: &str, known: &'static [&'static str]) -> Self {
        Self::new(ReadProblem::UnknownKey { key: field.to_owned(), known })
    }

    fn unknown_variant(variant: &str, known: &'static [&'static str]) -> Self {
        Self::new(ReadProblem::UnknownWord { word: Some(variant.to_owned()), known: known.to_vec() })
    }

    fn missing_field(field: &'static str) -> Self {
        Self::new(ReadProblem::Missing(field))
    }
}

impl<'de> IntoDeserializer<'de, ReadError> for &'de Node {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// Hands a value of the tree to serde.
impl<'de> Deserializer<'de> for &'de Node {
    type Error = ReadError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match &self.value {
            NodeValue::String(text) => visitor.visit_borrowed_str(text),
            NodeValue::Integer(number) => visitor.visit_i64(*number),
            NodeValue::Float(number) => visitor.visit_f64(*number),
            NodeValue::Boolean(value) => visitor.visit_bool(*value),
            NodeValue::Array(items) => {
                let mut sequence = SeqDeserializer::new(items.iter());
                visitor.visit_seq(&mut sequence).and_then(|value| sequence.end().map(|()| value))
            }
            NodeValue::Table(entries) => visitor.visit_map(TableAccess { entries: entries.iter(), current: None }),
        }
        .map_err(|error| error.at(self.spot, &self.value))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        visitor.visit_some(self)
    }

    /// serde's derive would read an array as the fields in their order.
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        match &self.value {
            NodeValue::Array(_) => Err(ReadError::invalid_type(Unexpected::Seq, &"a table").at(self.spot, &self.value)),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        let read = match self.as_str() {
            Some(word) => StrDeserializer::new(word).deserialize_enum(name, variants, visitor),
            // No enum of a recipe carries anything.
            None => Err(ReadError::new(ReadProblem::UnknownWord { word: None, known: variants.to_vec() })),
        };
        read.map_err(|error| error.at(self.spot, &self.value))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct newtype_struct
        seq tuple tuple_struct map identifier ignored_any
    }
}

struct TableAccess<'a> {
    entries: std::slice::Iter<'a, KeyValue>,
    current: Option<&'a KeyValue>,
}

impl<'de> MapAccess<'de> for TableAccess<'de> {
    type Error = ReadError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, ReadError> {
        self.current = self.entries.next();
        let Some(entry) = self.current else { return Ok(None) };
        seed.deserialize(StrDeserializer::new(&entry.key))
            .map(Some)
            .map_err(|error: ReadError| error.at(entry.spot, &entry.node.value))
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, ReadError> {
        let entry = self.current.ok_or_else(|| ReadError::custom("a value was asked for before its key"))?;
        seed.deserialize(&entry.node).map_err(|error| error.inside(&entry.key))
    }
}
