//! The files of a split, and how they are read: as the recipe says, or as their first rows show.

use std::path::{Path, PathBuf};

use super::faults::RowFault;
use super::formats::{RowFormat, detect, registered};
use super::rows::{self, SplitName};
use super::sample_place::{LineOrRecord, SamplePlace};
use crate::recipe::{DataFormat, DataPaths, DataRecipe};
use crate::units::Fault;

#[derive(Clone, Debug)]
pub struct DataSource {
    /// In the order in which they are read.
    pub files: Vec<PathBuf>,
    pub(super) format: &'static RowFormat,
    /// The format and what it was told from, where the recipe does not say.
    pub told: Option<String>,
    pub notes: Vec<String>,
    /// The recipe, with the columns that were told; the format is above.
    pub(super) rows: DataRecipe,
}

impl DataSource {
    /// Fails where files are missing, or nobody says which format they have.
    pub(super) fn find(recipe: &DataRecipe, paths: &DataPaths, split: SplitName) -> Result<Self, Fault> {
        let mut notes = Vec::new();
        let files = rows::find(paths.paths(), split, &mut notes)?;
        let mut rows = recipe.clone();
        let (format, told) = if let Some(format) = &recipe.format {
            (format.as_str(), None)
        } else {
            let detected = detect(&files, &rows)?;
            for path in paths.paths().iter().skip(1) {
                // The first rows say it of the first files alone.
                let first = rows::find(std::slice::from_ref(path), split, &mut Vec::new())?.swap_remove(0);
                let other = detect(std::slice::from_ref(&first), &rows).ok();
                let other = other.filter(|other| (other.format, &other.columns) != (detected.format, &detected.columns));
                if let Some(other) = other {
                    let place = SamplePlace { path: first.as_path().into(), at: LineOrRecord::Whole };
                    let found = format!("{}, but {}", other.words, detected.words);
                    return Err(RowFault::unknown_format(place, &found));
                }
            }
            if rows.columns.is_empty() {
                rows.columns = detected.columns;
            }
            (detected.format, Some(detected.words))
        };
        Ok(Self { files, format: registered(format)?, told, notes, rows })
    }

    pub fn format(&self) -> &'static DataFormat {
        &self.format.facts
    }

    /// The first file, by which messages call all of them.
    pub(super) fn first(&self) -> &Path {
        self.files.first().map_or(Path::new(""), PathBuf::as_path)
    }
}
