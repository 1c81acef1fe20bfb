//! Rows of a Parquet file. The file is foreign: whatever it makes its reader do becomes an error.

use std::fs::File;
use std::path::Path;

use arrow::array::RecordBatchReader;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use parquet::basic::Compression;
use parquet::file::metadata::RowGroupMetaData;

use super::arrow_values;
use super::row::{DataRow, Sink};
use crate::data::faults;
use crate::data::guard::WorkLimits;
use crate::data::sample_place::{LineOrRecord, SamplePlace};
use crate::files::{FileKind, open_to_read};
use crate::units::Fault;

/// Rows decoded at once: contexts are long, so few.
const BATCH_ROWS: usize = 16;

pub(super) fn each<E: From<Fault>>(path: &Path, limit: usize, sink: Sink<'_, E>) -> Result<(), E> {
    let broken = |message: String| faults::unreadable(path, "Parquet", &message);
    let file = open_to_read(path, FileKind::Data)?;
    // A row may be as long as a line, and a page holds some of them.
    let limits = WorkLimits::of("data", path, 16, 1.0);
    let size = file.metadata().map_err(faults::read(path))?.len() as usize;
    let mut reader = limits.guarded(size.min(limit), || reader(file)).map_err(broken)?;
    let types = arrow_values::column_types(&reader.schema()).map_err(broken)?;
    let mut record = 0;
    let mut next = || {
        limits.guarded(size.min(limit), || match reader.next() {
            None => Ok(None),
            Some(batch) => arrow_values::rows(&batch.map_err(|error| error.to_string())?).map(Some),
        })
    };
    while let Some(rows) = next().map_err(broken)? {
        for fields in rows {
            let place = SamplePlace { path: path.into(), at: LineOrRecord::Record(record) };
            sink(Ok(DataRow::typed(fields, place, types.clone())))?;
            record += 1;
        }
    }
    Ok(())
}

fn reader(file: File) -> Result<ParquetRecordBatchReader, String> {
    let size = file.metadata().map_err(|error| error.to_string())?.len();
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
    builder.with_batch_size(BATCH_ROWS).build().map_err(|error| error.to_string())
}
