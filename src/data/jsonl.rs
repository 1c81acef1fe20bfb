//! One JSON object per line: reads the lines and the fields, with the place in every error.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use serde_json::{Map, Value};

use super::error::DataError;
use super::example::{Content, Example};
use super::sample_place::{LineOrRecord, SamplePlace};

/// One line's object, knowing where it stands.
pub(super) struct Object {
    fields: Map<String, Value>,
    place: SamplePlace,
}

/// Makes an example of each line that is not blank.
pub(super) fn read(
    path: &Path,
    mut parse: impl FnMut(&mut Object) -> Result<Content, DataError>,
) -> Result<Vec<Example>, DataError> {
    let mut examples = Vec::new();
    each(path, |object| {
        examples.push(Example { at: object.place.at, content: parse(object)?, groups: None });
        Ok::<(), DataError>(())
    })?;
    Ok(examples)
}

/// Calls `row` for each line that is not blank, one line in memory at a time.
pub(super) fn each<E: From<DataError>>(path: &Path, mut row: impl FnMut(&mut Object) -> Result<(), E>) -> Result<(), E> {
    let file = File::open(path).map_err(DataError::read(path))?;
    for (index, line) in BufReader::with_capacity(1 << 20, file).split(b'\n').enumerate() {
        let mut line = line.map_err(DataError::read(path))?;
        if index == 0 && line.starts_with(b"\xef\xbb\xbf") {
            line.drain(..3);
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let place = SamplePlace { path: path.to_path_buf(), at: LineOrRecord::Line(index + 1) };
        let value = serde_json::from_slice(&line).map_err(|error| DataError::NotJson {
            place: format!("{}:{}", path.display(), index + 1),
            message: column_only(&error),
        })?;
        let Value::Object(fields) = value else {
            Err(DataError::Shape { place, expected: "a JSON object", found: kind(&value).to_owned() })?
        };
        row(&mut Object { fields, place })?;
    }
    Ok(())
}

impl Object {
    pub(super) fn place(&self) -> SamplePlace {
        self.place.clone()
    }

    /// Takes a field out; `None` where it is missing or null.
    pub(super) fn take(&mut self, field: &'static str) -> Option<Value> {
        self.fields.remove(field).filter(|value| !value.is_null())
    }

    /// Whether a field is there and a number.
    pub(super) fn is_number(&self, field: &'static str) -> bool {
        self.fields.get(field).is_some_and(Value::is_number)
    }

    /// Whether a field is there.
    pub(super) fn has(&self, field: &'static str) -> bool {
        self.fields.get(field).is_some_and(|value| !value.is_null())
    }

    /// Takes a field that must be there.
    pub(super) fn require(&mut self, field: &'static str) -> Result<Value, DataError> {
        self.take(field).ok_or_else(|| DataError::MissingField { place: self.place(), field })
    }

    /// Takes a text field.
    pub(super) fn text(&mut self, field: &'static str) -> Result<String, DataError> {
        match self.require(field)? {
            Value::String(text) => Ok(text),
            other => Err(self.bad(field, "a string", kind(&other))),
        }
    }

    pub(super) fn bad(&self, field: &'static str, expected: impl Into<String>, found: impl Into<String>) -> DataError {
        DataError::BadField { place: self.place(), field, expected: expected.into(), found: found.into() }
    }
}

/// The class by its number, at the key `label`.
pub(super) fn class(object: &mut Object, num_classes: usize) -> Result<usize, DataError> {
    let value = object.require("label")?;
    let class = value.as_u64().filter(|&class| class < num_classes as u64);
    class
        .map(|class| class as usize)
        .ok_or_else(|| object.bad("label", format!("a class from 0 to {}", num_classes - 1), value.to_string()))
}

/// What a value is, for messages.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// The parser counts lines within what it was given, which is always one: only its column means something.
fn column_only(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(end) => format!("{} at column {}", &text[..end], error.column()),
        None => text,
    }
}
