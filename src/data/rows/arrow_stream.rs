//! Rows of an Arrow file: of the stream format, as `datasets` writes it, or of the file format, which is a stream with a table of contents.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use arrow::buffer::Buffer;
use arrow::ipc::reader::StreamDecoder;

use super::arrow_values;
use super::row::DataRow;
use super::sink::Sink;
use crate::data::error::DataError;
use crate::data::guard::guarded;
use crate::data::sample_place::{LineOrRecord, SamplePlace};
use crate::files::{FileKind, open_to_read};

/// What the file format begins and ends with.
const MAGIC: &[u8; 6] = b"ARROW1";

/// What ends a stream.
const END: [u8; 8] = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];

/// Bytes that the decoder gets at once.
const PIECE: u64 = 1 << 20;

/// Rows that are turned into JSON at once.
const BATCH_ROWS: usize = 16;

/// Hands over each row. A stream without its end is cut off.
pub(super) fn each<E: From<DataError>>(path: &Path, sink: Sink<'_, E>) -> Result<(), E> {
    let broken = |message| DataError::Unreadable { path: path.to_path_buf(), as_what: "Arrow", message };
    let mut file = open_to_read(path, FileKind::Data).map_err(DataError::from)?;
    let mut messages = messages(&mut file).map_err(broken)?;
    let mut decoder = StreamDecoder::new();
    let mut types = None;
    let mut record = 0;
    loop {
        let mut piece = Vec::new();
        messages.by_ref().take(PIECE).read_to_end(&mut piece).map_err(DataError::read(path))?;
        if piece.is_empty() {
            break;
        }
        let mut piece = Buffer::from_vec(piece);
        // A batch may be the last of several in a piece, or need many pieces.
        while let Some(batch) = guarded(|| decoder.decode(&mut piece)).map_err(broken)? {
            let types = match &types {
                Some(types) => types,
                None => types.insert(arrow_values::column_types(&batch.schema()).map_err(broken)?),
            };
            for first in (0..batch.num_rows()).step_by(BATCH_ROWS) {
                let part = || arrow_values::rows(&batch.slice(first, BATCH_ROWS.min(batch.num_rows() - first)));
                for fields in guarded(part).map_err(broken)? {
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

/// The messages of the stream, without what ends it.
fn messages(file: &mut File) -> Result<impl Read, String> {
    let text = |error: std::io::Error| error.to_string();
    let length = file.seek(SeekFrom::End(0)).map_err(text)?;
    let mut bytes = |at: u64, count: usize| {
        let mut bytes = vec![0; count];
        file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(&mut bytes)).map(|()| bytes).map_err(text)
    };
    if length < 16 {
        return Err(format!("it has {length} bytes, too few for an Arrow file or stream"));
    }
    let (mut first, mut end) = (0, length);
    if bytes(0, MAGIC.len())? == MAGIC {
        let footer = bytes(length - 10, 10)?;
        if &footer[4..] != MAGIC {
            return Err("it is cut off: it does not end as it begins".to_owned());
        }
        let size = u64::from(u32::from_le_bytes([footer[0], footer[1], footer[2], footer[3]]));
        // What begins the file is padded with zeros.
        first = 8;
        while first < 64 && bytes(first, 8)? == [0; 8] {
            first += 8;
        }
        end = (length - 10).checked_sub(size).filter(|&end| end >= 16).ok_or("its footer is longer than the file")?;
    } else if bytes(0, 4)? != END[..4] {
        return Err("it begins neither as an Arrow file nor as an Arrow stream".to_owned());
    }
    // The footer of the file format is an end as well.
    if bytes(end - 8, 8)? == END {
        end -= 8;
    } else if first == 0 {
        return Err("it is cut off: the mark of the stream's end is missing".to_owned());
    }
    file.seek(SeekFrom::Start(first)).map_err(text)?;
    Ok(BufReader::new(file.take(end - first)))
}
