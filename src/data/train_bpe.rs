//! A byte-level BPE trained on the user's texts, for models that start from random weights.

use std::path::{Path, PathBuf};

use tokenizers::AddedToken;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::faults;
use super::guard::guarded;
use crate::files::{FileKind, read_bytes};
use crate::units::Fault;

/// The special tokens of a trained tokenizer, ids 0 to 3; the first one is EOS.
pub const SPECIAL_TOKENS: [&str; 4] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"];

/// The special tokens and one token per byte: no text can make a vocabulary smaller.
const MIN_VOCABULARY: usize = SPECIAL_TOKENS.len() + 256;

/// Trains on `texts` and returns the `tokenizer.json`, whose vocabulary has exactly `vocab_size` tokens. The same texts give the same bytes.
pub fn train_bpe(texts: &[PathBuf], vocab_size: usize) -> Result<String, Fault> {
    if vocab_size < MIN_VOCABULARY {
        return Err(too_small(vocab_size, MIN_VOCABULARY));
    }
    let mut contents = Vec::with_capacity(texts.len());
    for path in texts {
        let bytes = read_bytes(path, FileKind::Texts)?;
        contents.push(String::from_utf8_lossy(&bytes).into_owned());
    }
    let failed = |message: String| faults::bad_tokenizer(Path::new("tokenizer.json"), &message);
    let (json, found) = guarded(|| train(&contents, vocab_size)).map_err(failed)?;
    if found != vocab_size {
        return Err(too_small(vocab_size, found));
    }
    Ok(json)
}

/// Texts too small for a vocabulary of the wanted size; `found` could be reached, or is the smallest that is possible.
fn too_small(expected: usize, found: usize) -> Fault {
    let message = format!("the texts give a vocabulary of {found} tokens, expected {expected}");
    Fault::data(message, "give more text, or ask for a smaller vocabulary (at least 260)")
}

fn train(contents: &[String], vocab_size: usize) -> tokenizers::Result<(String, usize)> {
    let special = SPECIAL_TOKENS.map(|token| AddedToken::from(token, true));
    let trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(vocab_size)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(special.to_vec())
        .build();
    let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    // Line by line, so that the words of one long file are counted on all cores.
    let lines = contents.iter().flat_map(|text| text.split_inclusive('\n'));
    tokenizer.train(&mut TrainerWrapper::from(trainer), lines)?;
    let found = tokenizer.get_vocab_size(true);
    Ok((tokenizer.to_string(true)?, found))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Tokenizer;

    const TEXT: &str = "The cache holds keys and values; the policy picks the slots which the next chunk overwrites.\n";

    fn corpus(dir: &std::path::Path) -> Vec<PathBuf> {
        let paths = [dir.join("a.txt"), dir.join("b.txt")];
        std::fs::write(&paths[0], TEXT.repeat(3)).unwrap();
        std::fs::write(&paths[1], [TEXT.to_uppercase().as_bytes(), b"\xff\n"].concat()).unwrap();
        paths.to_vec()
    }

    #[test]
    fn the_same_texts_give_the_same_tokenizer() {
        let dir = tempfile::tempdir().unwrap();
        let texts = corpus(dir.path());
        let first = train_bpe(&texts, 300).unwrap();
        for _ in 0..3 {
            assert!(train_bpe(&texts, 300).unwrap() == first);
        }
        std::fs::write(dir.path().join("tokenizer.json"), &first).unwrap();
        std::fs::write(dir.path().join("tokenizer_config.json"), r#"{"eos_token": "<|endoftext|>"}"#).unwrap();
        let tokenizer = Tokenizer::load(dir.path()).unwrap();
        assert_eq!(tokenizer.eos().unwrap(), 0);
        for (id, token) in SPECIAL_TOKENS.iter().enumerate() {
            assert_eq!(tokenizer.encode(token).unwrap(), [id as u32]);
        }
        let text = "  unseen: naïve\t漢字\n";
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        assert!(tokenizer.encode(TEXT).unwrap().len() < TEXT.len() / 2);
    }

    #[test]
    fn a_vocabulary_that_cannot_be_reached_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let texts = corpus(dir.path());
        let error = train_bpe(&texts, 100).unwrap_err();
        assert_eq!(error.to_string(), "the texts give a vocabulary of 260 tokens, expected 100");
        assert!(train_bpe(&texts, 9000).unwrap_err().to_string().ends_with("expected 9000"));
        assert!(train_bpe(&[dir.path().join("none")], 300).unwrap_err().io().is_some());
    }
}
