//! Text columns of a Parquet file as rows. The file is foreign: whatever it makes its reader do becomes an error.

use std::fs::File;
use std::path::Path;

use arrow::array::{Array, LargeStringArray, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::DataType;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use super::error::DataError;
use super::guard::guarded;

/// The four bytes that a Parquet file begins with.
const MAGIC: &[u8] = b"PAR1";

/// Rows decoded at once: contexts are long, so few.
const BATCH_ROWS: usize = 16;

/// Whether the bytes begin a Parquet file.
pub(super) fn is_parquet(beginning: &[u8]) -> bool {
    beginning.starts_with(MAGIC)
}

/// The columns `names` of every row, in this order; `None` stands for null. Only the first `required` must be there.
pub(super) fn read<const N: usize>(
    path: &Path,
    names: [&'static str; N],
    required: usize,
) -> Result<Vec<[Option<String>; N]>, DataError> {
    let file = File::open(path).map_err(DataError::read(path))?;
    guarded(|| read_rows(file, names, required)).map_err(|message| DataError::Parquet { path: path.to_path_buf(), message })
}

fn read_rows<const N: usize>(file: File, names: [&'static str; N], required: usize) -> Result<Vec<[Option<String>; N]>, String> {
    let size = file.metadata().map_err(|error| error.to_string())?.len();
    let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|error| error.to_string())?;
    let is_there = |name: &str| builder.schema().field_with_name(name).is_ok();
    let columns: Vec<(usize, &str)> =
        names.into_iter().enumerate().filter(|&(column, name)| column < required || is_there(name)).collect();
    for &(_, name) in &columns {
        let known = || builder.schema().fields().iter().map(|field| format!("`{}`", field.name())).collect::<Vec<_>>().join(", ");
        let field = builder.schema().field_with_name(name);
        let field = field.map_err(|_| format!("column `{name}` is missing, found {}", known()))?;
        if !is_text(field.data_type()) {
            return Err(format!("column `{name}`: expected strings, found {}", field.data_type()));
        }
    }
    // A corrupt footer can ask for any amount of memory before a single page is looked at.
    let claimed: i64 =
        builder.metadata().row_groups().iter().map(|group| group.compressed_size().max(0)).fold(0, i64::saturating_add);
    if u64::try_from(claimed).unwrap_or(u64::MAX) > size {
        return Err(format!("its footer promises {claimed} bytes, the file has {size}"));
    }
    let mask = ProjectionMask::columns(builder.parquet_schema(), columns.iter().map(|&(_, name)| name));
    let reader = builder.with_projection(mask).with_batch_size(BATCH_ROWS).build().map_err(|error| error.to_string())?;
    let mut rows = Vec::new();
    for batch in reader {
        append(&batch.map_err(|error| error.to_string())?, &columns, &mut rows)?;
    }
    Ok(rows)
}

fn append<const N: usize>(
    batch: &RecordBatch,
    columns: &[(usize, &str)],
    rows: &mut Vec<[Option<String>; N]>,
) -> Result<(), String> {
    let first = rows.len();
    rows.resize_with(first + batch.num_rows(), || std::array::from_fn(|_| None));
    for &(column, name) in columns {
        let array = batch.column_by_name(name).ok_or_else(|| format!("column `{name}` is missing"))?;
        let array = cast(array, &DataType::LargeUtf8).map_err(|error| format!("column `{name}`: {error}"))?;
        let texts = array.as_any().downcast_ref::<LargeStringArray>();
        let texts = texts.ok_or_else(|| format!("column `{name}`: expected strings, found {}", array.data_type()))?;
        for (row, text) in texts.iter().enumerate() {
            rows[first + row][column] = text.map(str::to_owned);
        }
    }
    Ok(())
}

fn is_text(data_type: &DataType) -> bool {
    match data_type {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        DataType::Dictionary(_, values) => is_text(values),
        _ => false,
    }
}
