//! Pictures, sound and video, known by the names of columns and of parts of messages, are refused: the text alone would say something else.

use serde_json::{Map, Value};

use super::rows::{DataRow, kind};
use crate::units::Fault;

const MEDIA: [&str; 3] = ["image", "audio", "video"];

/// The name of what a part of a message holds, where that is no text.
pub(super) fn part_of_media(part: &Map<String, Value>) -> Option<&str> {
    let is_media = |name: &&str| MEDIA.iter().any(|kind| name.contains(kind)) || matches!(*name, "file" | "input_file");
    match part.get("type").and_then(Value::as_str) {
        Some("text") => None,
        Some(name) => Some(name).filter(is_media),
        None => part.keys().map(String::as_str).find(is_media),
    }
}

/// What follows the kind in the names of columns.
const ENDINGS: [&str; 6] = ["", "s", "_path", "_paths", "_url", "_urls"];

/// Refuses a row with a column of pictures, sound or video that holds something.
pub(super) fn refuse(row: &DataRow) -> Result<(), Fault> {
    let names = MEDIA.iter().flat_map(|kind| ENDINGS.iter().map(move |ending| format!("{kind}{ending}")));
    for name in names {
        let found = match row.fields().get(&name) {
            Some(value) if is_nothing(value) => continue,
            Some(value) => kind(value),
            None if row.is_left_out(&name) => "a value",
            None => continue,
        };
        let expected = "no pictures, sound or video, as models are run on text alone";
        let hint = "where the text is enough without it, write the files without this column; such rows alone are left out with \
                    `data.on_bad_row = \"drop\"`";
        return Err(row.bad(&name, expected, found).with_hint(hint));
    }
    Ok(())
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(values) => values.iter().all(is_nothing),
        Value::Object(fields) => fields.values().all(is_nothing),
        Value::Bool(_) | Value::Number(_) => false,
    }
}
