//! Rows of an Arrow file: of the stream format, as `datasets` writes it, or of the file format, as polars and Feather do.

use std::path::Path;
use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::buffer::Buffer;
use arrow::ipc::Block;
use arrow::ipc::reader::{FileDecoder, StreamDecoder};

use super::arrow_values;
use super::row::{DataRow, Sink};
use crate::data::arrow_file::{MAGIC, footer, part};
use crate::data::faults;
use crate::data::guard::WorkLimits;
use crate::data::sample_place::{LineOrRecord, SamplePlace};
use crate::files::{FileKind, map_file};
use crate::native::arrow_buffer;
use crate::units::Fault;

const END: [u8; 8] = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];

/// Rows that are turned into JSON at once: contexts are long, so few.
pub(super) const BATCH_ROWS: usize = 16;

/// Gives the batches one by one, each with the bytes that it takes in the file, or more.
pub(super) type NextBatch = Box<dyn FnMut() -> Result<Option<(RecordBatch, usize)>, String>>;

/// Hands over each row. A stream without its end is cut off.
pub(super) fn each<E: From<Fault>>(path: &Path, limit: usize, sink: Sink<'_, E>) -> Result<(), E> {
    let file = arrow_buffer(&map_file(path, FileKind::Data)?);
    let bounded = file.len().min(limit);
    let open = || if file.starts_with(MAGIC) { file_batches(file) } else { stream_batches(&file) };
    each_of(path, "Arrow", bounded, open, sink)
}

/// Hands over each row of the batches of a file. What is made of it is bounded as what so many bytes can ask for.
pub(super) fn each_of<E: From<Fault>>(
    path: &Path,
    as_what: &str,
    bounded: usize,
    open: impl FnOnce() -> Result<NextBatch, String>,
    sink: Sink<'_, E>,
) -> Result<(), E> {
    let broken = |message: String| faults::unreadable(path, as_what, &message);
    // Lists of nothing take no byte, and words of a dictionary one for each use.
    let limits = WorkLimits::of("data", path, 16, 1.0);
    let mut next = limits.guarded(bounded, open).map_err(broken)?;
    let mut types = None;
    let mut record = 0;
    while let Some((batch, bytes)) = limits.guarded(bounded, &mut next).map_err(broken)? {
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

fn file_batches(file: Buffer) -> Result<NextBatch, String> {
    let (footer, schema) = footer(&file)?;
    let mut decoder = FileDecoder::new(Arc::new(schema), footer.version());
    let dictionaries: Vec<Block> = footer.dictionaries().iter().flatten().copied().collect();
    let blocks: Vec<Block> = footer.recordBatches().iter().flatten().copied().collect();
    // A footer of a few bytes can list one batch any number of times.
    let mut promised = 0_usize;
    for block in dictionaries.iter().chain(&blocks) {
        promised = promised.saturating_add(part(&file, block)?.len());
    }
    if promised > file.len() {
        return Err(format!("its footer promises {promised} bytes, the file has {}", file.len()));
    }
    for block in &dictionaries {
        decoder.read_dictionary(block, &part(&file, block)?).map_err(|error| error.to_string())?;
    }
    let mut blocks = blocks.into_iter();
    Ok(Box::new(move || {
        let Some(block) = blocks.next() else { return Ok(None) };
        let part = part(&file, &block)?;
        let batch = decoder.read_record_batch(&block, &part).map_err(|error| error.to_string())?;
        Ok(Some((batch.ok_or("a batch of its footer is none")?, part.len())))
    }))
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
                return Ok(Some((batch, bytes)));
            }
            if is_at_end {
                return decoder.finish().map(|()| None).map_err(|error| format!("it is cut off: {error}"));
            }
            // What ends the stream, once: the decoder takes a message without a body only when something follows.
            (rest, is_at_end) = (Buffer::from(&END), true);
        }
    }))
}
