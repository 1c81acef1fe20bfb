//! `kvtune make-demo-data`: long documents with questions, from texts that are on this machine.

use std::path::PathBuf;

use clap::Args;

use super::counts::at_least_one;
use crate::data::demo;
use crate::error::Error;
use crate::report::console;

#[derive(Debug, Args)]
pub(super) struct MakeDemoData {
    /// Directory to write `train.json`, `validation.json` and `corpus/` to.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Documents to train on.
    #[arg(long, default_value_t = 24, value_parser = at_least_one())]
    train_samples: usize,
    /// Documents held out.
    #[arg(long, default_value_t = 6, value_parser = at_least_one())]
    validation_samples: usize,
    /// Shortest document, in tokens.
    #[arg(long, default_value_t = 8192, value_parser = at_least_one())]
    min_tokens: usize,
    /// Longest document, in tokens.
    #[arg(long, default_value_t = 32_768, value_parser = at_least_one())]
    max_tokens: usize,
    /// Seed of the choice of texts, questions and places.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl MakeDemoData {
    pub(super) fn run(&self) -> Result<(), Error> {
        let options = demo::Options {
            train_samples: self.train_samples,
            validation_samples: self.validation_samples,
            min_tokens: self.min_tokens,
            max_tokens: self.max_tokens,
            seed: self.seed,
            ..demo::Options::default()
        };
        Ok(console::result(&demo::make(&self.out, &options)?.to_string())?)
    }
}
