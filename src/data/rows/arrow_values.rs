//! Columns of Arrow as JSON values. Numbers stay numbers, and null stays null; so become NaN and the infinities, which JSON has not.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Float64Type, Int64Type, Schema, UInt64Type};
use serde_json::{Map, Number, Value};

use crate::units::quoted;

/// The types of columns, by name. No two columns may have one name.
pub(super) fn column_types(schema: &Schema) -> Result<Arc<BTreeMap<String, String>>, String> {
    let mut types = BTreeMap::new();
    for field in schema.fields() {
        if types.insert(field.name().clone(), field.data_type().to_string()).is_some() {
            return Err(format!("two columns are called `{}`", quoted(field.name())));
        }
    }
    Ok(Arc::new(types))
}

/// The rows of a batch. A column or a field of a type that JSON has no value for is left out: who asks for a column is told its type.
/// A structure has the fields of all rows; those that are null in it are not there.
pub(super) fn rows(batch: &RecordBatch) -> Result<Vec<Map<String, Value>>, String> {
    let mut rows = vec![Map::new(); batch.num_rows()];
    for (field, column) in batch.schema().fields().iter().zip(batch.columns()).filter(|(field, _)| is_known(field.data_type())) {
        let values = values(field, column, false).map_err(|message| format!("column `{}`: {message}", quoted(field.name())))?;
        for (row, value) in rows.iter_mut().zip(values) {
            row.insert(field.name().clone(), value);
        }
    }
    Ok(rows)
}

fn is_known(data_type: &DataType) -> bool {
    match data_type {
        DataType::Null | DataType::Boolean | DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View | DataType::Struct(_) => {
            true
        }
        DataType::Dictionary(_, values) => is_known(values),
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => is_known(item.data_type()),
        DataType::Map(entry, _) => is_known(entry.data_type()),
        other => other.is_integer() || other.is_floating(),
    }
}

/// `is_meant`: a field that is null says something, as below a default in a tool's schema.
fn values(field: &Field, array: &ArrayRef, is_meant: bool) -> Result<Vec<Value>, String> {
    let as_type = |data_type: &DataType| cast(array, data_type).map_err(|error| error.to_string());
    let or_null = |value: Option<Value>| value.unwrap_or(Value::Null);
    Ok(match array.data_type() {
        DataType::Null => vec![Value::Null; array.len()],
        DataType::Boolean => array.as_boolean().iter().map(|value| or_null(value.map(Value::Bool))).collect(),
        DataType::Dictionary(_, of) => values(field, &as_type(of)?, is_meant)?,
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => {
            // The canonical extension type of Arrow: `datasets` keeps so what has no type of its own.
            let is_json = field.extension_type_name() == Some("arrow.json");
            let value = |text: &str| if is_json { serde_json::from_str(text) } else { Ok(Value::from(text)) };
            let texts = as_type(&DataType::LargeUtf8)?;
            let read = texts.as_string::<i64>().iter().map(|text| text.map_or(Ok(Value::Null), value));
            read.collect::<Result<_, _>>().map_err(|error| format!("a text that should be JSON is none: {error}"))?
        }
        DataType::UInt64 => array.as_primitive::<UInt64Type>().iter().map(|number| or_null(number.map(Value::from))).collect(),
        integer if integer.is_integer() => {
            let numbers = as_type(&DataType::Int64)?;
            numbers.as_primitive::<Int64Type>().iter().map(|number| or_null(number.map(Value::from))).collect()
        }
        float if float.is_floating() => {
            let numbers = as_type(&DataType::Float64)?;
            let number = |number: Option<f64>| or_null(number.and_then(Number::from_f64).map(Value::Number));
            numbers.as_primitive::<Float64Type>().iter().map(number).collect()
        }
        DataType::List(item) => lists(item, array.as_list::<i32>().iter(), is_meant)?,
        DataType::LargeList(item) => lists(item, array.as_list::<i64>().iter(), is_meant)?,
        DataType::FixedSizeList(item, _) => lists(item, array.as_fixed_size_list().iter(), is_meant)?,
        DataType::Map(entry, _) => {
            let entries = array.as_map().iter().map(|entries| entries.map(|entries| Arc::new(entries) as ArrayRef));
            lists(entry, entries, true)?.into_iter().map(object).collect::<Result<_, _>>()?
        }
        DataType::Struct(fields) => {
            let mut objects = vec![Map::new(); array.len()];
            let columns = fields.iter().zip(array.as_struct().columns());
            for (field, column) in columns.filter(|(field, _)| is_known(field.data_type())) {
                let is_meant = is_meant || MEANT.contains(&&**field.name());
                let values = objects.iter_mut().zip(values(field, column, is_meant)?);
                for (object, value) in values.filter(|(_, value)| is_meant || !value.is_null()) {
                    object.insert(field.name().clone(), value);
                }
            }
            let object = |(index, object)| if array.is_null(index) { Value::Null } else { Value::Object(object) };
            objects.into_iter().enumerate().map(object).collect()
        }
        other => return Err(format!("JSON has no {other}")),
    })
}

/// What may be null in a tool's schema.
const MEANT: [&str; 3] = ["default", "const", "enum"];

fn lists(item: &Field, lists: impl Iterator<Item = Option<ArrayRef>>, is_meant: bool) -> Result<Vec<Value>, String> {
    lists.map(|list| list.map_or(Ok(Value::Null), |list| values(item, &list, is_meant).map(Value::Array))).collect()
}

/// The object whose entries are such a list of keys and values.
fn object(entries: Value) -> Result<Value, String> {
    let Value::Array(entries) = entries else { return Ok(entries) };
    let entry = |entry: Value| {
        let mut fields = if let Value::Object(fields) = entry { fields.into_iter() } else { Map::new().into_iter() };
        match (fields.next(), fields.next()) {
            (Some((_, Value::String(key))), Some((_, value))) => Ok((key, value)),
            _ => Err("JSON has no map but from texts".to_owned()),
        }
    };
    entries.into_iter().map(entry).collect::<Result<_, _>>().map(Value::Object)
}
