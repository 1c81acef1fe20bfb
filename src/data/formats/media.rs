//! Pictures, sound and video, which no model here reads: a row that has any is refused, as its text alone would say something else.

use crate::data::error::{DataError, TEXT_ALONE};
use crate::data::media::MEDIA;
use crate::data::rows::{DataRow, kind};

/// What follows the kind in the names of columns.
const ENDINGS: [&str; 6] = ["", "s", "_path", "_paths", "_url", "_urls"];

/// Refuses a row with a column of pictures, sound or video that holds something.
pub(super) fn refuse(row: &DataRow) -> Result<(), DataError> {
    let names = MEDIA.iter().flat_map(|kind| ENDINGS.iter().map(move |ending| format!("{kind}{ending}")));
    for name in names {
        let found = match row.fields().get(&name) {
            Some(value) if is_nothing(value) => continue,
            Some(value) => kind(value),
            None if row.is_left_out(&name) => "a value",
            None => continue,
        };
        return Err(row.bad(&name, TEXT_ALONE, found));
    }
    Ok(())
}

fn is_nothing(value: &serde_json::Value) -> bool {
    use serde_json::Value;
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(values) => values.iter().all(is_nothing),
        Value::Object(fields) => fields.values().all(is_nothing),
        Value::Bool(_) | Value::Number(_) => false,
    }
}
