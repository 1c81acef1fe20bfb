//! Rows of an Arrow file: of the stream format, as `datasets` writes it, or of the file format, as polars and Feather do.

use std::path::Path;

use arrow::buffer::Buffer;
use arrow::ipc::reader::StreamDecoder;

use super::arrow_file::{ArrowBatch, MAGIC, NextBatch};
use super::row::DataRow;
use super::sink::Sink;
use super::{arrow_file, arrow_values};
use crate::data::faults;
use crate::data::guard::WorkLimits;
use crate::data::sample_place::{LineOrRecord, SamplePlace};
use crate::files::MappedFile;
use crate::units::Fault;

const END: [u8; 8] = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];

/// Rows that are turned into JSON at once.
const BATCH_ROWS: usize = 16;

/// Hands over each row. A stream without its end is cut off.
pub(super) fn each<E: From<Fault>>(path: &Path, limit: usize, sink: Sink<'_, E>) -> Result<(), E> {
    let broken = |message: String| faults::unreadable(path, "Arrow", &message);
    // Lists of nothing take no byte, and words of a dictionary one for each use.
    let limits = WorkLimits::of("data", path, 16, 1.0);
    let file = MappedFile::open(path)?.arrow_buffer();
    let bounded = file.len().min(limit);
    let open = || if file.starts_with(MAGIC) { arrow_file::batches(file) } else { stream_batches(&file) };
    let mut next = limits.guarded(bounded, open).map_err(broken)?;
    let mut types = None;
    let mut record = 0;
    while let Some(ArrowBatch { batch, bytes }) = limits.guarded(bounded, &mut next).map_err(broken)? {
        if batch.num_rows() > bytes.saturating_mul(8) {
            Err(broken(format!("a batch says it has {} rows, in {bytes} bytes", batch.num_rows())))?;
        }
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
    Ok(())
}

fn stream_batches(file: &Buffer) -> Result<NextBatch, String> {
    let length = file.len();
    if length < 16 {
        return Err(format!("it has {length} bytes, too few for an Arrow file or stream"));
    }
    if file.starts_with(b"FEA1") {
        return Err("it is Feather of version 1, expected version 2, which is an Arrow file".to_owned());
    }
    if !file.starts_with(&END[..4]) {
        return Err("it begins neither as an Arrow file nor as an Arrow stream".to_owned());
    }
    if !file.ends_with(&END) {
        return Err("it is cut off: the mark of the stream's end is missing".to_owned());
    }
    let mut decoder = StreamDecoder::new();
    let (mut rest, mut is_at_end) = (file.slice_with_length(0, length - END.len()), false);
    Ok(Box::new(move || {
        let mut bytes = 0;
        loop {
            let before = rest.len();
            let batch = decoder.decode(&mut rest).map_err(|error| error.to_string())?;
            bytes += before - rest.len();
            if let Some(batch) = batch {
                return Ok(Some(ArrowBatch { batch, bytes }));
            }
            if is_at_end {
                return decoder.finish().map(|()| None).map_err(|error| format!("it is cut off: {error}"));
            }
            // What ends the stream, once: the decoder takes a message without a body only when something follows.
            (rest, is_at_end) = (Buffer::from(&END), true);
        }
    }))
}
