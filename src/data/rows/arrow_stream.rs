//! Rows of an Arrow file: of the stream format, as `datasets` writes it, or of the file format, which is a stream with a table of contents.

use std::ops::Range;
use std::path::Path;

use arrow::buffer::Buffer;
use arrow::ipc::reader::StreamDecoder;
use bytes::Bytes;

use super::arrow_values;
use super::row::DataRow;
use super::sink::Sink;
use crate::data::error::DataError;
use crate::data::guard::{WorkLimits, guarded};
use crate::data::sample_place::{LineOrRecord, SamplePlace};
use crate::files::MappedFile;

/// What the file format begins and ends with.
const MAGIC: &[u8] = b"ARROW1";

/// What ends a stream.
const END: [u8; 8] = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];

/// Rows that are turned into JSON at once.
const BATCH_ROWS: usize = 16;

/// Hands over each row. A stream without its end is cut off.
pub(super) fn each<E: From<DataError>>(path: &Path, limit: usize, sink: Sink<'_, E>) -> Result<(), E> {
    let broken = |message| DataError::Unreadable { path: path.to_path_buf(), as_what: "Arrow", message };
    // Lists of nothing take no byte, and words of a dictionary one for each use.
    let limits = WorkLimits::of("data", path, 16, 1.0);
    let file = Buffer::from(Bytes::from_owner(MappedFile::open(path).map_err(DataError::from)?));
    let messages = messages(&file).map_err(broken)?;
    let messages = file.slice_with_length(messages.start, messages.len());
    let mut decoder = StreamDecoder::new();
    let mut types = None;
    let (mut record, mut held) = (0, 0_usize);
    // What ends the stream, once: the decoder takes a message without a body only when something follows.
    for mut rest in [messages, Buffer::from(&END)] {
        loop {
            let before = rest.len();
            let bounded = before.min(limit);
            let batch = limits.guarded(bounded, || decoder.decode(&mut rest)).map_err(broken)?;
            held += before - rest.len();
            let Some(batch) = batch else { break };
            if batch.num_rows() > held.saturating_mul(8) {
                Err(broken(format!("a batch says it has {} rows, in {held} bytes", batch.num_rows())))?;
            }
            held = 0;
            let types = match &types {
                Some(types) => types,
                None => types.insert(arrow_values::column_types(&batch.schema()).map_err(broken)?),
            };
            for first in (0..batch.num_rows()).step_by(BATCH_ROWS) {
                let part = || arrow_values::rows(&batch.slice(first, BATCH_ROWS.min(batch.num_rows() - first)));
                for fields in limits.guarded(bounded, part).map_err(broken)? {
                    let place = SamplePlace { path: path.into(), at: LineOrRecord::Record(record) };
                    sink(Ok(DataRow::typed(fields, place, types.clone())))?;
                    record += 1;
                }
            }
        }
    }
    guarded(|| decoder.finish()).map_err(|message| broken(format!("it is cut off: {message}")))?;
    Ok(())
}

/// Where the messages of the stream lie in a file.
fn messages(file: &[u8]) -> Result<Range<usize>, String> {
    let length = file.len();
    if length < 16 {
        return Err(format!("it has {length} bytes, too few for an Arrow file or stream"));
    }
    let (mut first, mut end) = (0, length);
    if file.starts_with(MAGIC) {
        let footer = &file[length - 10..];
        if &footer[4..] != MAGIC {
            return Err("it is cut off: it does not end as it begins".to_owned());
        }
        let size = u32::from_le_bytes([footer[0], footer[1], footer[2], footer[3]]) as usize;
        // What begins the file is padded with zeros.
        first = 8;
        while first < 64 && file.get(first..first + 8) == Some(&[0; 8]) {
            first += 8;
        }
        end = (length - 10).checked_sub(size).filter(|&end| end >= 16).ok_or("its footer is longer than the file")?;
    } else if !file.starts_with(&END[..4]) {
        return Err("it begins neither as an Arrow file nor as an Arrow stream".to_owned());
    }
    // The footer of the file format is an end as well.
    if file[end - 8..end] == END {
        end -= 8;
    } else if first == 0 {
        return Err("it is cut off: the mark of the stream's end is missing".to_owned());
    }
    if first > end { Err("its footer is longer than the file".to_owned()) } else { Ok(first..end) }
}
