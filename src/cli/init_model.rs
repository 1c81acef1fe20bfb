//! `kvtune init-model`: a random checkpoint with a tokenizer trained on given texts.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use crate::data::{SPECIAL_TOKENS, train_bpe};
use crate::model::{self, ModelConfig};
use crate::report::console;
use crate::units::Fault;

/// Write a small random checkpoint with a tokenizer of its own, for tests and demonstrations.
#[derive(Debug, Args)]
pub(super) struct InitModel {
    /// Hugging Face `config.json` of the model to make.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Texts to train the byte-level BPE tokenizer on; its size is the config's `vocab_size`. Without any the model has no tokenizer,
    /// for data of token ids.
    #[arg(long, value_name = "TEXT", num_args = 1..)]
    tokenizer_from: Vec<PathBuf>,
    /// Directory to write; must be empty or not exist.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The seed of the weights.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl InitModel {
    pub(super) fn run(&self) -> Result<(), Fault> {
        let wanted = ModelConfig::load_file(&self.config)?;
        let texts = Some(&self.tokenizer_from).filter(|texts| !texts.is_empty());
        let tokenizer = texts.map(|texts| train_bpe(texts, wanted.vocab_size)).transpose()?;
        let config = model::init_model(&self.config, tokenizer.as_ref().map(String::as_bytes), &self.out, self.seed)?;
        let special =
            if tokenizer.is_some() { format!("special tokens {}", SPECIAL_TOKENS.join(" ")) } else { "no tokenizer".into() };
        let words = format!("wrote {} (vocabulary of {}, {special})", self.out.display(), config.vocab_size);
        console::outcome(&words, &json!({ "wrote": self.out, "vocab_size": config.vocab_size }))
    }
}
