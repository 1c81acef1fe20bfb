//! Data for a demonstration on real long texts: questions in LongBench v2's schema, made from documents on this machine.
//!
//! Nothing is downloaded. Training and held-out questions come from different documents.

mod documents;
mod html;
mod questions;
mod roff;

mod make;

pub use make::make;

use std::fmt;
use std::path::PathBuf;

use super::tokenizer::Tokenizer;

/// What to make.
#[derive(Clone, Debug)]
pub struct Options {
    /// Questions to train on.
    pub train_samples: usize,
    /// Questions held out.
    pub validation_samples: usize,
    /// Tokens of the shortest context.
    pub min_tokens: usize,
    /// Tokens of the longest context.
    pub max_tokens: usize,
    /// Bytes of text per token, where there is no tokenizer yet.
    pub chars_per_token: f64,
    /// Measures contexts exactly, instead of by `chars_per_token`.
    pub tokenizer: Option<Tokenizer>,
    /// Draws documents, lengths, places and answers.
    pub seed: u64,
    /// Folders to look for documents in; empty stands for the usual places of a Debian machine with Rust.
    pub folders: Vec<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            train_samples: 48,
            validation_samples: 16,
            min_tokens: 8_000,
            max_tokens: 32_000,
            chars_per_token: 3.0,
            tokenizer: None,
            seed: 0,
            folders: Vec::new(),
        }
    }
}

/// What was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DemoReport {
    /// Training questions, a JSON array in LongBench v2's schema.
    pub train: PathBuf,
    /// Held-out questions, likewise.
    pub validation: PathBuf,
    /// Texts to train a tokenizer on: the training documents, one file per source.
    pub corpus: Vec<PathBuf>,
    /// Documents used for training and held out.
    pub documents: (usize, usize),
    /// Tokens of the shortest and of the longest context, as measured.
    pub context_tokens: (usize, usize),
    /// Number of documents per source.
    pub sources: Vec<(String, usize)>,
}

impl fmt::Display for DemoReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (train, held_out) = self.documents;
        let (shortest, longest) = self.context_tokens;
        let sources: Vec<String> = self.sources.iter().map(|(name, count)| format!("{name} {count}")).collect();
        writeln!(f, "{train} documents to train on, {held_out} others held out ({})", sources.join(", "))?;
        writeln!(f, "contexts of {shortest} to {longest} tokens")?;
        write!(f, "wrote `{}` and `{}`", self.train.display(), self.validation.display())
    }
}
