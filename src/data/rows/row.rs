//! One row of a file: its fields, its place, and errors that name both; whom rows are handed to, and how they are read.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::data::faults::RowFault;
use crate::data::sample_place::SamplePlace;
use crate::units::{Fault, listed, quoted};

/// Takes rows, or what is wrong with them. Its own errors end the walk; as an `Option<Fault>` one is [`ENOUGH`] where nobody asks for more.
pub(in crate::data) type Sink<'a, E> = &'a mut dyn FnMut(Result<DataRow, Fault>) -> Result<(), E>;

/// What ends a walk over rows without an error.
pub(in crate::data) const ENOUGH: Option<Fault> = None;

#[derive(Clone, Debug, PartialEq)]
pub(in crate::data) struct DataRow {
    fields: Map<String, Value>,
    place: SamplePlace,
    types: Option<Arc<BTreeMap<String, String>>>,
}

impl DataRow {
    pub(in crate::data) fn new(fields: Map<String, Value>, place: SamplePlace) -> Self {
        Self { fields, place, types: None }
    }

    pub(super) fn typed(fields: Map<String, Value>, place: SamplePlace, types: Arc<BTreeMap<String, String>>) -> Self {
        Self { fields, place, types: Some(types) }
    }

    /// With the columns under the names of the fields that they hold.
    pub(super) fn renamed(mut self, columns: &BTreeMap<String, String>) -> Result<Self, Fault> {
        let mut values = Vec::with_capacity(columns.len());
        for (field, column) in columns {
            let value = self.fields.remove(column).ok_or_else(|| self.missing(column))?;
            values.push((field.clone(), value));
        }
        self.fields.extend(values);
        if let Some(types) = self.types.take() {
            let mut named = BTreeMap::clone(&types);
            named.extend(columns.iter().filter_map(|(field, column)| Some((field.clone(), types.get(column)?.clone()))));
            self.types = Some(if columns.is_empty() { types } else { Arc::new(named) });
        }
        Ok(self)
    }

    pub(in crate::data) fn place(&self) -> SamplePlace {
        self.place.clone()
    }

    pub(in crate::data) fn fields(&self) -> &Map<String, Value> {
        &self.fields
    }

    /// Takes a field out; `None` where it is missing or null.
    pub(in crate::data) fn take(&mut self, field: &str) -> Option<Value> {
        self.fields.remove(field).filter(|value| !value.is_null())
    }

    pub(in crate::data) fn has(&self, field: &str) -> bool {
        self.fields.get(field).is_some_and(|value| !value.is_null())
    }

    /// Whether it is a column of a type that no field has, so that nobody knows what it holds.
    pub(in crate::data) fn is_left_out(&self, field: &str) -> bool {
        !self.fields.contains_key(field) && self.types.as_ref().is_some_and(|types| types.contains_key(field))
    }

    pub(in crate::data) fn require(&mut self, field: &str) -> Result<Value, Fault> {
        self.require_as(field, "a value")
    }

    pub(in crate::data) fn text(&mut self, field: &str) -> Result<String, Fault> {
        match self.require_as(field, "a string")? {
            Value::String(text) => Ok(text),
            other => Err(self.bad(field, "a string", kind(&other))),
        }
    }

    pub(in crate::data) fn optional_text(&mut self, field: &str) -> Result<Option<String>, Fault> {
        if self.has(field) { self.text(field).map(Some) } else { Ok(None) }
    }

    /// Takes an array; an empty one where the field is missing.
    pub(in crate::data) fn list(&mut self, field: &str) -> Result<Vec<Value>, Fault> {
        if self.has(field) { self.array(field, "an array") } else { Ok(Vec::new()) }
    }

    pub(in crate::data) fn array(&mut self, field: &str, expected: &str) -> Result<Vec<Value>, Fault> {
        match self.require(field)? {
            Value::Array(values) => Ok(values),
            other => Err(self.bad(field, expected, kind(&other))),
        }
    }

    pub(in crate::data) fn texts(&mut self, field: &str) -> Result<Vec<String>, Fault> {
        let found = match self.require_as(field, "an array of at least 1 string")? {
            Value::Array(texts) if texts.is_empty() => "an empty array".to_owned(),
            Value::Array(texts) => match texts.iter().position(|text| !text.is_string()) {
                None => return Ok(texts.into_iter().filter_map(|text| text.as_str().map(str::to_owned)).collect()),
                Some(at) => format!("{} at index {at}", kind(&texts[at])),
            },
            other => kind(&other).to_owned(),
        };
        Err(self.bad(field, "an array of at least 1 string", found))
    }

    fn require_as(&mut self, field: &str, expected: &str) -> Result<Value, Fault> {
        match self.fields.remove(field) {
            Some(Value::Null) => Err(self.bad(field, expected, "null")),
            Some(value) => Ok(value),
            None if self.is_left_out(field) => Err(self.bad(field, expected, "a value")),
            None => Err(self.missing(field)),
        }
    }

    fn missing(&self, field: &str) -> Fault {
        let others = listed(self.fields.keys().map(|name| format!("`{}`", quoted(name))));
        let others = if others.is_empty() { others } else { format!(", others are {others}") };
        let message = format!("{}: field `{}` is missing{others}", self.place, quoted(field));
        let hint = "check `data.format` against what the file holds; a column of another name is named as in \
                    `data.columns = { prompt = \"question\" }`";
        RowFault::bad(self.place(), message, hint)
    }

    /// What is wrong with a field; says the type of its column, where columns have types.
    pub(in crate::data) fn bad(&self, field: &str, expected: impl Into<String>, found: impl Into<String>) -> Fault {
        let of_type = self.types.as_ref().and_then(|types| types.get(field)).map(|name| format!(" in a column of {name}"));
        let found = found.into() + &of_type.unwrap_or_default();
        let (field, expected) = (quoted(field), expected.into());
        let message = format!("{}: field `{field}`: expected {expected}, found {}", self.place, quoted(found));
        RowFault::bad(self.place(), message, "correct the field, or remove the sample")
    }
}

/// The class by its number, at the key `label`.
pub(in crate::data) fn class(row: &mut DataRow, num_classes: usize) -> Result<usize, Fault> {
    let value = row.require("label")?;
    let class = value.as_u64().map(|class| class as usize).filter(|&class| class < num_classes);
    class.ok_or_else(|| row.bad("label", format!("a class from 0 to {}", num_classes - 1), value.to_string()))
}

pub(in crate::data) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

pub(super) fn utf8(bytes: Vec<u8>, place: &SamplePlace) -> Result<String, Fault> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let message = format!("byte {} is 0x{:02x}, which is not UTF-8", at + 1, error.as_bytes()[at]);
        RowFault::unusable(place.clone(), &message)
    })
}

/// How many values the JSON of a row may hold that may have `max_bytes` bytes: each takes many times its bytes.
pub(super) fn max_values(max_bytes: usize) -> usize {
    const FEW: usize = 1 << 16;
    (max_bytes / 16).max(FEW)
}

pub(super) const TOO_MANY_VALUES: &str = "more values than one for each 16 bytes that `data.max_line_bytes` allows";

pub(super) fn too_long(place: SamplePlace, limit: usize) -> Fault {
    let message = format!("more than {limit} bytes, which is the most that `data.max_line_bytes` allows");
    let hint = "raise it, or shorten the row; of JSON lines such rows are left out with `data.on_bad_row = \"drop\"`";
    RowFault::unusable(place, &message).with_hint(hint)
}
