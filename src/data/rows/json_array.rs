//! One JSON array of objects, read one object at a time.

use std::cell::Cell;
use std::io::{self, Read};

use serde_json::Value;

use super::input::{Input, ReadBy};
use super::row::{DataRow, Sink, TOO_MANY_VALUES, kind, max_values, too_long};
use crate::data::faults::RowFault;
use crate::data::sample_place::{LineOrRecord, SamplePlace};
use crate::files::StrictJson;
use crate::units::Fault;

/// Hands over each element of the array.
pub(super) fn each<E: From<Fault>>(mut input: Input, limit: usize, sink: Sink<'_, E>) -> Result<(), E> {
    let path = input.path.clone();
    let place = |record| SamplePlace { path: path.as_path().into(), at: LineOrRecord::Record(record) };
    let mut reader = std::mem::replace(&mut input.reader, Box::new(io::empty()));
    // Bytes that the record may still have; none where it has had more.
    let left = Cell::new(Some(limit));
    let mut json = serde_json::Deserializer::from_reader(ReadBy(|buffer: &mut [u8]| {
        let read = reader.read(buffer)?;
        left.set(left.get().and_then(|left| left.checked_sub(read)));
        if left.get().is_some() { Ok(read) } else { Err(io::Error::other("the record is too long")) }
    }));
    let (mut stopped, mut records) = (None, 0);
    let values = Cell::new(max_values(limit));
    let strict = StrictJson::new(&values, TOO_MANY_VALUES);
    let mut hand_over = |value| {
        left.set(Some(limit));
        values.set(max_values(limit));
        let row = match value {
            Value::Object(fields) => Ok(DataRow::new(fields, place(records))),
            other => Err(RowFault::no_object(place(records), kind(&other))),
        };
        records += 1;
        sink(row).map_err(|error| stopped = Some(error)).is_ok()
    };
    let ended = strict.each_item(&mut json, &mut hand_over).and_then(|()| json.end());
    match (stopped, ended) {
        (Some(error), _) => Err(error),
        (None, Ok(())) => Ok(()),
        (None, Err(_)) if left.get().is_none() => Err(too_long(place(records), limit).into()),
        (None, Err(error)) if error.is_io() => Err(input.error(error.into()).into()),
        (None, Err(error)) => Err(RowFault::not_json(place(records), &error.to_string()).into()),
    }
}
