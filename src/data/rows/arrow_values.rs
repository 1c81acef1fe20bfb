//! Columns of Arrow as JSON values. Numbers stay numbers, and null stays null; so become NaN and the infinities, which JSON has not.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Float64Type, Int64Type, Schema, UInt64Type};
use serde_json::{Map, Number, Value};

use super::row::{TOO_MANY_VALUES, max_values};
use crate::files::StrictJson;
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
        DataType::Null | DataType::Boolean | DataType::Struct(_) => true,
        DataType::Dictionary(_, values) => is_known(values),
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => is_known(item.data_type()),
        DataType::Map(entry, _) => match entry.data_type() {
            DataType::Struct(fields) => is_text(fields[0].data_type()) && is_known(fields[1].data_type()),
            _ => false,
        },
        other => is_text(other) || other.is_integer() || other.is_floating(),
    }
}

fn is_text(data_type: &DataType) -> bool {
    matches!(data_type, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View)
}

/// `keeps_nulls`: a field of a structure is there though it is null.
fn values(field: &Field, array: &ArrayRef, keeps_nulls: bool) -> Result<Vec<Value>, String> {
    let as_type = |data_type: &DataType| cast(array, data_type).map_err(|error| error.to_string());
    let or_null = |value: Option<Value>| value.unwrap_or(Value::Null);
    Ok(match array.data_type() {
        DataType::Null => vec![Value::Null; array.len()],
        DataType::Boolean => array.as_boolean().iter().map(|value| or_null(value.map(Value::Bool))).collect(),
        DataType::Dictionary(_, of) => values(field, &as_type(of)?, keeps_nulls)?,
        text if is_text(text) => {
            // The canonical extension type of Arrow: `datasets` keeps so what has no type of its own.
            let is_json = field.extension_type_name() == Some("arrow.json");
            // One that is no JSON stays a text, which who asks for it refuses.
            let json = |text: &str| StrictJson::new(&Cell::new(max_values(text.len())), TOO_MANY_VALUES).parse(text).ok();
            let value = |text: &str| if is_json { json(text) } else { None }.unwrap_or_else(|| text.into());
            let texts = as_type(&DataType::LargeUtf8)?;
            texts.as_string::<i64>().iter().map(|text| or_null(text.map(value))).collect()
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
        DataType::List(item) => lists(item, array.as_list::<i32>().iter(), keeps_nulls)?,
        DataType::LargeList(item) => lists(item, array.as_list::<i64>().iter(), keeps_nulls)?,
        DataType::FixedSizeList(item, _) => lists(item, array.as_fixed_size_list().iter(), keeps_nulls)?,
        DataType::Map(entry, _) => {
            let DataType::Struct(fields) = entry.data_type() else { return Err("a map has no entries".to_owned()) };
            let entries = array.as_map().iter().map(|entries| {
                let Some(entries) = entries else { return Ok(Value::Null) };
                let [keys, values] = [0, 1].map(|i| values(&fields[i], entries.column(i), keeps_nulls));
                let named = |(key, value): (Value, Value)| Some((key.as_str()?.to_owned(), value));
                Ok::<_, String>(Value::Object(keys?.into_iter().zip(values?).filter_map(named).collect()))
            });
            entries.collect::<Result<_, _>>()?
        }
        DataType::Struct(fields) => {
            let mut objects = vec![Map::new(); array.len()];
            let columns = fields.iter().zip(array.as_struct().columns());
            for (field, column) in columns.filter(|(field, _)| is_known(field.data_type())) {
                let keeps_nulls = keeps_nulls || KEEP_NULLS.contains(&&**field.name());
                let values = objects.iter_mut().zip(values(field, column, keeps_nulls)?);
                for (object, value) in values.filter(|(_, value)| keeps_nulls || !value.is_null()) {
                    object.insert(field.name().clone(), value);
                }
            }
            let object = |(index, object)| if array.is_null(index) { Value::Null } else { Value::Object(object) };
            objects.into_iter().enumerate().map(object).collect()
        }
        other => return Err(format!("JSON has no {other}")),
    })
}

/// Fields whose nulls say something, and those below them: in a tool's schema.
const KEEP_NULLS: [&str; 3] = ["default", "const", "enum"];

fn lists(item: &Field, lists: impl Iterator<Item = Option<ArrayRef>>, keeps_nulls: bool) -> Result<Vec<Value>, String> {
    lists.map(|list| list.map_or(Ok(Value::Null), |list| values(item, &list, keeps_nulls).map(Value::Array))).collect()
}
