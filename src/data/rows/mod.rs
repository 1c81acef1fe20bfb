//! Files of any kind as rows: JSON objects that know where they stand, one at a time.
//!
//! [`each`] walks one file; which kind it is its first bytes tell, and its name where they do not. What is wrong with one row is handed
//! over in its place, and the walk goes on; what is wrong with the file ends it. [`find`] finds the files.

mod arrow_rows;
mod arrow_values;
mod csv_rows;
mod input;
mod json_array;
mod lines;
mod parquet_rows;
mod row;
mod sources;
#[cfg(test)]
mod sources_tests;
#[cfg(test)]
mod tests;

use std::io::Read;
use std::path::Path;

use super::sample_place::{LineOrRecord, SamplePlace};
use crate::recipe::DataRecipe;
use crate::units::Fault;
use input::Kind;
pub(super) use row::{DataRow, ENOUGH, Sink, class, kind};
pub use sources::SplitName;
pub(super) use sources::find;

/// Hands over the rows of a file in their order, a few of which are in memory. Of the recipe its longest line and its columns count. Fails where
/// the file cannot be read, is damaged or cut off, or `sink` refuses.
pub(super) fn each<E: From<Fault>>(path: &Path, recipe: &DataRecipe, sink: Sink<'_, E>) -> Result<(), E> {
    let mut renamed = |row: Result<DataRow, Fault>| sink(row.and_then(|row| row.renamed(&recipe.columns)));
    let limit = recipe.max_line_bytes;
    let (kind, mut input) = input::open(path)?;
    match kind {
        Kind::Lines => lines::each(input, limit, &mut renamed),
        Kind::Array => json_array::each(input, limit, &mut renamed),
        Kind::Csv(delimiter) => csv_rows::each(input, delimiter, limit, &mut renamed),
        Kind::Parquet => parquet_rows::each(path, limit, &mut renamed),
        Kind::Arrow => arrow_rows::each(path, limit, &mut renamed),
        Kind::Document => {
            let place = SamplePlace { path: path.into(), at: LineOrRecord::Whole };
            let mut bytes = Vec::new();
            let read =
                input.reader.by_ref().take(limit as u64 + 1).read_to_end(&mut bytes).map_err(|error| input.error(error))?;
            if read > limit {
                return renamed(Err(row::too_long(place, limit)));
            }
            renamed(
                row::utf8(bytes, &place)
                    .map(|text| DataRow::new([("text".to_owned(), text.into())].into_iter().collect(), place)),
            )
        }
    }
}
