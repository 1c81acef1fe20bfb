//! One JSON array of objects, read one object at a time.

use std::cell::Cell;
use std::fmt;
use std::io::{self, BufRead, Read};
use std::rc::Rc;

use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::Value;

use super::input::Input;
use super::row::{DataRow, Sink, TOO_MANY_VALUES, kind, max_values, too_long};
use crate::data::faults::RowFault;
use crate::data::sample_place::{LineOrRecord, SamplePlace};
use crate::files::StrictJson;
use crate::units::Fault;

/// Hands over each element of the array.
pub(super) fn each<E: From<Fault>>(mut input: Input, limit: usize, sink: Sink<'_, E>) -> Result<(), E> {
    let path = input.path.clone();
    let place = |record| SamplePlace { path: path.as_path().into(), at: LineOrRecord::Record(record) };
    let reader = std::mem::replace(&mut input.reader, Box::new(io::empty()));
    let left = Rc::new(Cell::new(Some(limit)));
    let mut json = serde_json::Deserializer::from_reader(Metered { reader, left: Rc::clone(&left) });
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
    let ended = json.deserialize_seq(Elements(strict, &mut hand_over)).and_then(|()| json.end());
    match (stopped, ended) {
        (Some(error), _) => Err(error),
        (None, Ok(())) => Ok(()),
        (None, Err(_)) if left.get().is_none() => Err(too_long(place(records), limit).into()),
        (None, Err(error)) if error.is_io() => Err(input.error(error.into()).into()),
        (None, Err(error)) => Err(RowFault::not_json(place(records), &error.to_string()).into()),
    }
}

/// What is done with each element; false ends the walk.
struct Elements<'a>(StrictJson<'a>, &'a mut dyn FnMut(Value) -> bool);

impl<'de> Visitor<'de> for Elements<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        while let Some(element) = elements.next_element_seed(self.0)? {
            if !self.1(element) {
                return Err(A::Error::custom("the walk was ended"));
            }
        }
        Ok(())
    }
}

/// A reader that refuses records of too many bytes.
struct Metered {
    reader: Box<dyn BufRead>,
    /// Bytes that the record may still have; `None` where it has had more.
    left: Rc<Cell<Option<usize>>>,
}

impl Read for Metered {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        self.left.set(self.left.get().and_then(|left| left.checked_sub(read)));
        if self.left.get().is_some() { Ok(read) } else { Err(io::Error::other("the record is too long")) }
    }
}
