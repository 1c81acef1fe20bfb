//! Batches of Arrow's file format, which its footer lists: what stands before them need not be a stream, and with polars it is none.

use std::sync::Arc;

use arrow::array::RecordBatch;
use arrow::buffer::Buffer;
use arrow::ipc::convert::try_fb_to_schema;
use arrow::ipc::reader::FileDecoder;
use arrow::ipc::{Block, root_as_footer};

/// What the file format begins and ends with.
pub(super) const MAGIC: &[u8] = b"ARROW1";

pub(super) struct ArrowBatch {
    pub(super) batch: RecordBatch,
    /// Bytes that it takes in the file, or a few more.
    pub(super) bytes: usize,
}

pub(super) type NextBatch = Box<dyn FnMut() -> Result<Option<ArrowBatch>, String>>;

/// The batches in the order of the footer.
pub(super) fn batches(file: Buffer) -> Result<NextBatch, String> {
    let end = file.len().saturating_sub(10);
    if end < 8 || &file[end + 4..] != MAGIC {
        return Err("it is cut off: it does not end as it begins".to_owned());
    }
    let size = u32::from_le_bytes([file[end], file[end + 1], file[end + 2], file[end + 3]]) as usize;
    let start = end.checked_sub(size).ok_or("its footer is longer than the file")?;
    let footer = root_as_footer(&file[start..end]).map_err(|error| format!("its footer: {error}"))?;
    let schema = footer.schema().ok_or("its footer has no schema")?;
    if !schema.endianness().equals_to_target_endianness() {
        return Err("its numbers are of another byte order than this machine's".to_owned());
    }
    let schema = try_fb_to_schema(schema).map_err(|error| error.to_string())?;
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
        Ok(Some(ArrowBatch { batch: batch.ok_or("a batch of its footer is none")?, bytes: part.len() }))
    }))
}

/// The bytes of a block, all of which lie in the file.
fn part(file: &Buffer, block: &Block) -> Result<Buffer, String> {
    let (first, head, body) = (block.offset(), i64::from(block.metaDataLength()), block.bodyLength());
    let inside = || {
        let (first, head, body) = (usize::try_from(first).ok()?, usize::try_from(head).ok()?, usize::try_from(body).ok()?);
        let length = head.checked_add(body).filter(|_| head >= 8)?;
        let end = first.checked_add(length)?;
        (end <= file.len()).then(|| file.slice_with_length(first, length))
    };
    inside().ok_or_else(|| format!("its footer names a part of {body} bytes at {first}, outside of the file"))
}
