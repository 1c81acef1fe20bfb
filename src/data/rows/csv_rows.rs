//! Rows of values between commas, under names in the first line.

use std::cell::RefCell;
use std::collections::{HashSet, VecDeque};
use std::io::{self, BufRead, Read};
use std::path::Path;
use std::rc::Rc;

use csv::{ByteRecord, ErrorKind, ReaderBuilder};
use serde_json::Value;

use super::input::Input;
use super::row::{self, DataRow, Sink};
use crate::data::faults::{self, RowFault};
use crate::data::sample_place::{LineOrRecord, SamplePlace};
use crate::units::{Fault, quoted};

/// Hands over each row; all values are texts.
pub(super) fn each<E: From<Fault>>(mut input: Input, delimiter: u8, limit: usize, sink: Sink<'_, E>) -> Result<(), E> {
    let path = input.path.clone();
    let reader = std::mem::replace(&mut input.reader, Box::new(io::empty()));
    let lines = Rc::new(RefCell::new(VecDeque::new()));
    let next_line = || lines.borrow_mut().pop_front().unwrap_or_default();
    let quotes = Quotes {
        path: &path,
        reader,
        delimiter,
        limit,
        state: ValuePart::Start,
        line: 1,
        begun: 1,
        length: 0,
        lines: Rc::clone(&lines),
    };
    let mut reader = ReaderBuilder::new().delimiter(delimiter).buffer_capacity(1 << 16).from_reader(quotes);
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

/// A reader that knows whether a quote is open: the parser takes the file's end for its end.
struct Quotes<'a> {
    path: &'a Path,
    reader: Box<dyn BufRead>,
    delimiter: u8,
    limit: usize,
    state: ValuePart,
    line: u64,
    /// Line of the row, or within it of the open quote.
    begun: u64,
    /// Bytes of the row so far.
    length: usize,
    /// In which lines the rows begin that were read and not yet handed over; the parser counts blank lines to the row behind them.
    lines: Rc<RefCell<VecDeque<u64>>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ValuePart {
    Start,
    Plain,
    Quoted,
    /// Behind a quote, which is the last one or the first of two.
    Quote,
}

impl Quotes<'_> {
    fn step(&mut self, byte: u8) {
        let ends_row = self.state != ValuePart::Quoted && matches!(byte, b'\n' | b'\r');
        self.state = match (self.state, byte) {
            (ValuePart::Quoted, b'"') => ValuePart::Quote,
            (ValuePart::Quoted, _) | (ValuePart::Start | ValuePart::Quote, b'"') => ValuePart::Quoted,
            _ if ends_row || byte == self.delimiter => ValuePart::Start,
            _ => ValuePart::Plain,
        };
        self.line += u64::from(byte == b'\n');
        self.length = if ends_row { 0 } else { self.length + 1 };
        if self.length == 1 {
            self.begun = self.line;
            self.lines.borrow_mut().push_back(self.line);
        }
    }
}

impl Read for Quotes<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        if read == 0 && self.state == ValuePart::Quoted && !buffer.is_empty() {
            let fault = RowFault::unusable(place(self.path, self.begun), "a quote is opened here and never closed");
            return Err(io::Error::other(fault.with_hint("close it, or double it where it is part of a value")));
        }
        for &byte in &buffer[..read] {
            let was_open = self.state == ValuePart::Quoted;
            self.step(byte);
            if self.state == ValuePart::Quoted && !was_open && byte == b'"' {
                self.begun = self.line;
            }
            if self.length > self.limit {
                return Err(io::Error::other(row::too_long(place(self.path, self.begun), self.limit)));
            }
        }
        Ok(read)
    }
}
