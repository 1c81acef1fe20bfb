//! Rows of a Parquet file. The file is foreign: whatever it makes its reader do becomes an error.

use std::fs::File;
use std::path::Path;

use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::Compression;
use parquet::file::metadata::RowGroupMetaData;

use super::arrow_rows::{BATCH_ROWS, NextBatch, each_of};
use super::row::Sink;
use crate::data::faults;
use crate::files::{FileKind, open_to_read};
use crate::units::Fault;

pub(super) fn each<E: From<Fault>>(path: &Path, limit: usize, sink: Sink<'_, E>) -> Result<(), E> {
    let file = open_to_read(path, FileKind::Data)?;
    let size = file.metadata().map_err(faults::read(path))?.len();
    // A row may be as long as a line, and a page holds some of them.
    each_of(path, "Parquet", limit.min(size as usize), || batches(file, size), sink)
}

fn batches(file: File, size: u64) -> Result<NextBatch, String> {
    let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| error.to_string())?;
    // A corrupt footer can ask for any amount of memory before a single page is looked at.
    let claimed: i64 =
        builder.metadata().row_groups().iter().map(|group| group.compressed_size().max(0)).fold(0, i64::saturating_add);
    if u64::try_from(claimed).unwrap_or(u64::MAX) > size {
        return Err(format!("its footer promises {claimed} bytes, the file has {size}"));
    }
    let mut columns = builder.metadata().row_groups().iter().flat_map(RowGroupMetaData::columns);
    if columns.any(|column| column.compression() == Compression::LZO) {
        return Err("its pages are packed with LZO; Snappy, gzip, Brotli, LZ4 and Zstandard are read".to_owned());
    }
    let mut reader = builder.with_batch_size(BATCH_ROWS).build().map_err(|error| error.to_string())?;
    Ok(Box::new(move || {
        let batch = reader.next().transpose().map_err(|error| error.to_string())?;
        // Where many rows are one value that is repeated they take next to nothing; of a batch there are few.
        Ok(batch.map(|batch| (batch, usize::MAX)))
    }))
}
