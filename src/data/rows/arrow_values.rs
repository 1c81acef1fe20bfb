//! Columns of Arrow as JSON values. Numbers stay numbers, and null stays null; so become NaN and the infinities, which JSON has not.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float64Type, Int64Type, Schema, UInt64Type};
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
pub(super) fn rows(batch: &RecordBatch) -> Result<Vec<Map<String, Value>>, String> {
    let mut rows = vec![Map::new(); batch.num_rows()];
    for (field, column) in batch.schema().fields().iter().zip(batch.columns()).filter(|(field, _)| is_known(field.data_type())) {
        let values = values(column).map_err(|message| format!("column `{}`: {message}", quoted(field.name())))?;
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
        other => other.is_integer() || other.is_floating(),
    }
}

fn values(array: &ArrayRef) -> Result<Vec<Value>, String> {
    let as_type = |data_type: &DataType| cast(array, data_type).map_err(|error| error.to_string());
    let or_null = |value: Option<Value>| value.unwrap_or(Value::Null);
    Ok(match array.data_type() {
        DataType::Null => vec![Value::Null; array.len()],
        DataType::Boolean => array.as_boolean().iter().map(|value| or_null(value.map(Value::Bool))).collect(),
        DataType::Dictionary(_, of) => values(&as_type(of)?)?,
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => {
            let texts = as_type(&DataType::LargeUtf8)?;
            texts.as_string::<i64>().iter().map(|text| or_null(text.map(Value::from))).collect()
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
        DataType::List(_) => lists(array.as_list::<i32>().iter())?,
        DataType::LargeList(_) => lists(array.as_list::<i64>().iter())?,
        DataType::FixedSizeList(..) => lists(array.as_fixed_size_list().iter())?,
        DataType::Struct(fields) => {
            let mut objects = vec![Map::new(); array.len()];
            let columns = fields.iter().zip(array.as_struct().columns());
            for (field, column) in columns.filter(|(field, _)| is_known(field.data_type())) {
                for (object, value) in objects.iter_mut().zip(values(column)?) {
                    object.insert(field.name().clone(), value);
                }
            }
            let object = |(index, object)| if array.is_null(index) { Value::Null } else { Value::Object(object) };
            objects.into_iter().enumerate().map(object).collect()
        }
        other => return Err(format!("JSON has no {other}")),
    })
}

fn lists(lists: impl Iterator<Item = Option<ArrayRef>>) -> Result<Vec<Value>, String> {
    lists.map(|list| list.map_or(Ok(Value::Null), |list| values(&list).map(Value::Array))).collect()
}
