//! How results are printed, for people or for programs.

use clap::ValueEnum;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    #[value(alias = "table")]
    Text,
    Json,
}
