//! Rows of values between commas, under names in the first line.

use std::cell::RefCell;
use std::collections::{HashSet, VecDeque};
use std::io::{self, Read};
use std::path::Path;

use csv::{ByteRecord, ErrorKind, ReaderBuilder};
use serde_json::Value;

use super::input::{Input, ReadBy};
use super::row::{self, DataRow, Sink};
use crate::data::faults::{self, RowFault};
use crate::data::sample_place::{LineOrRecord, SamplePlace};
use crate::units::{Fault, quoted};

/// Hands over each row; all values are texts.
pub(super) fn each<E: From<Fault>>(mut input: Input, delimiter: u8, limit: usize, sink: Sink<'_, E>) -> Result<(), E> {
    let path = input.path.clone();
    let reader = std::mem::replace(&mut input.reader, Box::new(io::empty()));
    let lines = RefCell::new(VecDeque::new());
    let next_line = || lines.borrow_mut().pop_front().unwrap_or_default();
    let bytes = checked(reader, &path, delimiter, limit, &lines);
    let mut reader = ReaderBuilder::new().delimiter(delimiter).buffer_capacity(1 << 16).from_reader(bytes);
    let header = reader.byte_headers().map_err(|error| broken(&input, error))?.clone();
    let first = place(&path, next_line());
    // Without names there are no rows that might be left out.
    let names =
        texts(&header, &first).map_err(|error| error.with_hint("convert it with `iconv -f ENCODING -t UTF-8 IN > OUT`"))?;
    let mut seen = HashSet::new();
    if let Some(twice) = names.iter().find(|name| !seen.insert(*name)) {
        let fault = RowFault::unusable(first, &format!("two columns are called `{}`", quoted(twice)));
        Err(fault.with_hint("give each column a name of its own in the first line"))?;
    }
    let mut record = ByteRecord::new();
    loop {
        let row = match reader.read_byte_record(&mut record) {
            Ok(false) => return Ok(()),
            Ok(true) => {
                let place = place(&path, next_line());
                texts(&record, &place).map(|values| {
                    let values = values.into_iter().map(Value::String);
                    DataRow::new(names.iter().cloned().zip(values).collect(), place)
                })
            }
            Err(error) => match error.kind() {
                ErrorKind::UnequalLengths { expected_len, len, .. } => {
                    let message = format!("expected {expected_len} values, as the first line has names, found {len}");
                    Err(RowFault::unusable(place(&path, next_line()), &message))
                }
                _ => Err(broken(&input, error))?,
            },
        };
        sink(row)?;
    }
}

fn place(path: &Path, line: u64) -> SamplePlace {
    SamplePlace { path: path.into(), at: LineOrRecord::Line(line as usize) }
}

fn texts(record: &ByteRecord, place: &SamplePlace) -> Result<Vec<String>, Fault> {
    record.iter().map(|value| row::utf8(value.to_vec(), place)).collect()
}

fn broken(input: &Input, error: csv::Error) -> Fault {
    match error.into_kind() {
        // What the reader below has refused, or the system.
        ErrorKind::Io(error) => error.downcast::<Fault>().unwrap_or_else(|error| input.error(error)),
        other => faults::unreadable(&input.path, "CSV", &format!("{other:?}")),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ValuePart {
    Start,
    Plain,
    Quoted,
    /// Behind a quote, which is the last one or the first of two.
    Quote,
}

/// What a reader gives, unless a quote is open at its end, which the parser takes for that of the quote, or a row has more bytes than `limit`.
/// `lines` gets the lines in which rows begin: the parser counts blank lines to the row behind them.
fn checked(mut reader: impl Read, path: &Path, delimiter: u8, limit: usize, lines: &RefCell<VecDeque<u64>>) -> impl Read {
    // The line of the row, or within it of the open quote; and the bytes of the row so far.
    let (mut begun, mut length) = (1, 0);
    let (mut part, mut line) = (ValuePart::Start, 1);
    ReadBy(move |buffer: &mut [u8]| {
        let read = reader.read(buffer)?;
        if read == 0 && part == ValuePart::Quoted && !buffer.is_empty() {
            let fault = RowFault::unusable(place(path, begun), "a quote is opened here and never closed");
            return Err(fault.with_hint("close it, or double it where it is part of a value").into());
        }
        for &byte in &buffer[..read] {
            let was_open = part == ValuePart::Quoted;
            let ends_row = !was_open && matches!(byte, b'\n' | b'\r');
            part = match (part, byte) {
                (ValuePart::Quoted, b'"') => ValuePart::Quote,
                (ValuePart::Quoted, _) | (ValuePart::Start | ValuePart::Quote, b'"') => ValuePart::Quoted,
                _ if ends_row || byte == delimiter => ValuePart::Start,
                _ => ValuePart::Plain,
            };
            line += u64::from(byte == b'\n');
            length = if ends_row { 0 } else { length + 1 };
            if length == 1 {
                lines.borrow_mut().push_back(line);
            }
            if length == 1 || part == ValuePart::Quoted && !was_open {
                begun = line;
            }
            if length > limit {
                return Err(row::too_long(place(path, begun), limit).into());
            }
        }
        Ok(read)
    })
}
