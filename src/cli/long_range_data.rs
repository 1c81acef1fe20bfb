//! `kvtune make-long-range-data`: three long-range tasks in a small language.

use std::path::PathBuf;

use clap::Args;

use super::counts::at_least_one;
use crate::data::{LongRangeOptions, make_long_range};
use crate::error::Error;
use crate::report::console;

#[derive(Debug, Args)]
pub(super) struct MakeLongRangeData {
    /// Directory to write `train.jsonl` and `test-TASK.jsonl` to, in the format `tokens`, of 512 words.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Tokens of a sample.
    #[arg(long, default_value_t = 512, value_parser = at_least_one())]
    tokens: usize,
    /// Training samples of each task.
    #[arg(long, default_value_t = 4096, value_parser = at_least_one())]
    train_samples: usize,
    /// Test samples of each task.
    #[arg(long, default_value_t = 256, value_parser = at_least_one())]
    test_samples: usize,
    /// Let training samples ask all that they know, not only as much as the test samples do.
    #[arg(long)]
    ask_all: bool,
    /// Put a copy of a passage behind every training sample: a model that knows nothing yet learns from copying to look up.
    #[arg(long)]
    copies: bool,
    /// Seed of facts, questions, places and noise.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl MakeLongRangeData {
    pub(super) fn run(&self) -> Result<(), Error> {
        let options = LongRangeOptions {
            tokens: self.tokens,
            train_samples: self.train_samples,
            test_samples: self.test_samples,
            asks_all: self.ask_all,
            copies: self.copies,
            seed: self.seed,
        };
        Ok(console::result(&make_long_range(&self.out, &options)?.to_string())?)
    }
}
