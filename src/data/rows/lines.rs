//! A JSON object a line.

use std::cell::Cell;
use std::io::{BufRead, Read};

use serde_json::Value;

use super::input::Input;
use super::row::{self, DataRow, Sink, kind};
use crate::data::faults::RowFault;
use crate::data::sample_place::{LineOrRecord, SamplePlace};
use crate::files::StrictJson;
use crate::units::Fault;

/// Blank lines in a row that are skipped: a packed file may hold any number.
const MAX_BLANK: usize = 1 << 20;

/// Bytes behind the limit after which a file without an end of line is none of lines, whatever is to become of bad rows.
const NO_LINE: u64 = 1 << 29;

/// Hands over each line that is not blank; only `\n` ends a line.
pub(super) fn each<E: From<Fault>>(mut input: Input, limit: usize, sink: Sink<'_, E>) -> Result<(), E> {
    let path = input.path.clone();
    // One object alone is mostly something around the records.
    let may_be_alone = path.extension().is_none_or(|extension| extension != "json");
    let (mut rows, mut blank) = (0_usize, 0_usize);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let mut part = input.reader.by_ref().take(limit as u64 + 1);
        let read = part.read_until(b'\n', &mut line).map_err(|error| input.error(error))?;
        if read == 0 {
            break;
        }
        let place = SamplePlace { path: path.as_path().into(), at: LineOrRecord::Line(number) };
        if read > limit && line.last() != Some(&b'\n') {
            let rest = input.reader.by_ref().take(NO_LINE).skip_until(b'\n').map_err(|error| input.error(error))?;
            if rest as u64 == NO_LINE {
                Err(row::too_long(place.clone(), limit))?;
            }
            sink(Err(row::too_long(place, limit)))?;
        } else if !line.trim_ascii().is_empty() {
            line.pop_if(|last| *last == b'\n');
            sink(parse(std::mem::take(&mut line), place, limit))?;
            blank = 0;
        } else {
            blank += 1;
            if blank > MAX_BLANK {
                let message = format!("more than {MAX_BLANK} blank lines before it");
                Err(RowFault::unusable(place, &message))?;
            }
            continue;
        }
        rows += 1;
    }
    if rows == 1 && !may_be_alone {
        Err(input.one_object())?;
    }
    Ok(())
}

fn parse(line: Vec<u8>, place: SamplePlace, limit: usize) -> Result<DataRow, Fault> {
    let text = row::utf8(line, &place)?;
    let not_json = |error| RowFault::not_json(place.clone(), &column_only(&error));
    let value = StrictJson::new(&Cell::new(row::max_values(limit)), row::TOO_MANY_VALUES).parse(&text).map_err(not_json)?;
    match value {
        Value::Object(fields) => Ok(DataRow::new(fields, place)),
        other => Err(RowFault::no_object(place, kind(&other))),
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
