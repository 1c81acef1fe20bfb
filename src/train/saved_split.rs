//! Which samples a run trains on and which it validates with, kept in its directory: a resumed run must find the same.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::TrainError;
use crate::data::{Dataset, Splits};
use crate::files::{self, FileKind};

/// Its name in a run's directory.
pub(super) const SPLIT: &str = "split.json";

/// The samples of a run.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedSplit {
    train: SavedSamples,
    validation: Option<SavedSamples>,
}

/// Some samples of a data file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedSamples {
    file: String,
    /// Of its content.
    hash: String,
    /// Indices from 0, in order: the first of a run of neighbours and the one behind its last.
    samples: Vec<(usize, usize)>,
}

impl SavedSamples {
    fn of(data: &Dataset) -> Self {
        let samples = data.samples();
        let neighbours = samples.chunk_by(|a, b| a + 1 == *b).map(|run| (run[0], run[0] + run.len()));
        Self { file: data.path().display().to_string(), hash: data.hash().to_owned(), samples: neighbours.collect() }
    }

    /// Fails where the content of the file, or what is made of it, is another.
    fn check(&self, data: &Dataset, split: &Path) -> Result<(), TrainError> {
        let found = Self::of(data);
        if found.hash != self.hash {
            return Err(TrainError::OtherData { path: data.path().to_owned() });
        }
        if found.samples != self.samples {
            return Err(TrainError::OtherSplit { path: data.path().to_owned(), split: split.to_owned() });
        }
        Ok(())
    }
}

impl SavedSplit {
    /// Writes down what a run begins with.
    pub(super) fn write(data: &Splits, dir: &Path) -> Result<(), TrainError> {
        let split = Self { train: SavedSamples::of(&data.train), validation: data.validation.as_ref().map(SavedSamples::of) };
        Ok(files::write_atomic(&dir.join(SPLIT), &files::to_json(&split))?)
    }

    /// Fails where the data are not those that the run in `dir` began with. A run of an earlier version has not written them down.
    pub(super) fn check(data: &Splits, dir: &Path) -> Result<(), TrainError> {
        let path = dir.join(SPLIT);
        if !path.exists() {
            return Ok(());
        }
        let split: Self = files::read_json_as(&path, FileKind::Record)?;
        split.train.check(&data.train, &path)?;
        match (&split.validation, &data.validation) {
            (Some(saved), Some(data)) => saved.check(data, &path),
            (None, None) => Ok(()),
            _ => Err(TrainError::OtherSplit { path: data.train.path().to_owned(), split: path }),
        }
    }
}
