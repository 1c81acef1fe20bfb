//! Arrow's file format by its footer, which lists the batches: what stands before them need not be a stream, and with polars it is none.

use arrow::buffer::Buffer;
use arrow::datatypes::Schema;
use arrow::ipc::convert::try_fb_to_schema;
use arrow::ipc::{Block, Footer, root_as_footer};

/// What the file format begins and ends with.
pub(super) const MAGIC: &[u8] = b"ARROW1";

/// The footer of a file, and the schema that it has.
pub(super) fn footer(file: &[u8]) -> Result<(Footer<'_>, Schema), String> {
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
    Ok((footer, try_fb_to_schema(schema).map_err(|error| error.to_string())?))
}

/// The bytes of a block, all of which lie in the file.
pub(super) fn part(file: &Buffer, block: &Block) -> Result<Buffer, String> {
    let (first, head, body) = (block.offset(), i64::from(block.metaDataLength()), block.bodyLength());
    let inside = || {
        let head = usize::try_from(head).ok().filter(|head| *head >= 8)?;
        let (first, length) = (usize::try_from(first).ok()?, head.checked_add(usize::try_from(body).ok()?)?);
        (first.checked_add(length)? <= file.len()).then(|| file.slice_with_length(first, length))
    };
    inside().ok_or_else(|| format!("its footer names a part of {body} bytes at {first}, outside of the file"))
}
