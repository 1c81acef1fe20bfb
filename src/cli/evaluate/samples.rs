//! The samples of an evaluation: which split, and how many of it.

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::data::{Dataset, Splits};
use crate::recipe::{OnTooLong, Recipe};
use crate::units::Fault;

// No documentation of its own: clap would take it for that of the verb.
#[derive(Debug, Args)]
pub(in crate::cli) struct SampleArguments {
    /// Which samples to use; `rest`: those of the training file that `data.on_too_long = "drop"` leaves out.
    #[arg(long, value_enum, default_value_t = Split::Validation)]
    pub(super) split: Split,
    /// Use only the first N samples of the split.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) limit: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Split {
    Train,
    Validation,
    Rest,
}

impl SampleArguments {
    pub(in crate::cli) fn choose(&self, splits: Splits, recipe: &Recipe) -> Result<Dataset, Fault> {
        let (found, message, hint) = match self.split {
            Split::Train => (Some(splits.train), "", ""),
            Split::Validation => (
                splits.validation,
                "the recipe holds no samples out for validation",
                "use `--split train`, or `--set data.validation_fraction=0.1`",
            ),
            Split::Rest if recipe.data.each().any(|data| data.on_too_long == OnTooLong::Drop) => (
                splits.rest,
                "no sample is left out that the model has positions for",
                "set a smaller `data.max_seq_length`, or use another `--split`",
            ),
            Split::Rest => (
                None,
                "no sample is left out: `data.on_too_long` is not `drop`",
                "use `--set data.on_too_long=drop` with the `data.max_seq_length` of training",
            ),
        };
        let limit = self.limit.map_or(usize::MAX, |limit| limit as usize);
        found.map(|dataset| dataset.first(limit)).ok_or_else(|| Fault::usage(message, hint))
    }
}
