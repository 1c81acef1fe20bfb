//! What can go wrong while a text is generated.

use std::path::PathBuf;

use crate::engine::EngineError;
use crate::units::{Exit, Failure, Fault, FaultKind, abridged, quoted};

/// A rule that cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{key}` is {found}, expected {expected}")]
pub struct RuleFault {
    pub key: String,
    pub found: String,
    pub expected: &'static str,
}

#[derive(Debug, thiserror::Error)]
pub enum GenerationError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Data(#[from] Fault),
    /// `generation_config.json` says what can not be followed.
    #[error("`{}`: {fault}", abridged(path.display()), fault = abridged(fault))]
    Config { path: PathBuf, fault: RuleFault },
    /// A prompt has no tokens.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// A prompt has a token that the model does not know.
    #[error("token {token} of the prompt is not in the vocabulary of {vocab_size}")]
    UnknownToken { token: u32, vocab_size: usize },
    /// Prompt and answer together are longer than the model's positions.
    #[error("a prompt of {prompt} tokens and {new_tokens} new ones are more than the {longest} positions of the model")]
    TooLong {
        prompt: usize,
        /// The most tokens that the answer may have.
        new_tokens: usize,
        longest: usize,
    },
    /// The rules forbid every token, or the model's logits are no numbers.
    #[error("no token can come next: the rules forbid all of them, or the model's logits are not finite")]
    NothingLikely,
    /// A session can not be kept, as what it has read depends on the length of the whole.
    #[error("the rotary embeddings of this model depend on the length of the whole text, so that no session can be kept")]
    RotatesByLength,
    /// Stop strings without a tokenizer.
    #[error("stop strings need text, and the model has no `tokenizer.json`")]
    NoText,
    /// A file is no saved session.
    #[error("`{}` is no saved session: {reason}", abridged(path.display()), reason = abridged(reason))]
    NotASession { path: PathBuf, reason: String },
    /// A session was saved with something else.
    #[error("the session in `{}` was saved with another `{what}`: expected {expected}, found {found}", abridged(path.display()), found = quoted(found))]
    OtherSession { path: PathBuf, what: String, expected: String, found: String },
}

impl Failure for GenerationError {
    fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Config { .. } => "correct the file, or ask for `--greedy` with a copy of the model without it".into(),
            Self::EmptyPrompt => "give a text, or tokens".into(),
            Self::UnknownToken { .. } => "make the tokens with the model's own tokenizer".into(),
            Self::TooLong { .. } => {
                "shorten the prompt, ask for fewer tokens with `--max-new-tokens`, or scale the rotary embeddings with \
                 `model.rope_scaling`"
                    .into()
            }
            Self::NothingLikely => "allow more tokens; `kvtune evaluate` says whether the model's loss is finite".into(),
            Self::RotatesByLength => "give document and question together with each `--prompt-file`".into(),
            Self::NoText => "use `--eos` with token ids instead".into(),
            Self::NotASession { .. } => "name a file that `--save-session` has written".into(),
            Self::OtherSession { .. } => "read the document again with `--save-session`, or use what it was saved with".into(),
            Self::Data(e) => return e.hint(),
            Self::Engine(_) => return self.origin()?.hint(),
        })
    }

    fn kind(&self) -> FaultKind {
        match self {
            Self::TooLong { .. } => FaultKind::ContextLength,
            Self::EmptyPrompt | Self::UnknownToken { .. } => FaultKind::BadPrompt,
            Self::NothingLikely => FaultKind::NothingLikely,
            _ => self.origin().map_or(FaultKind::Other, Failure::kind),
        }
    }

    fn exit(&self) -> Exit {
        match self {
            Self::NotASession { .. } | Self::OtherSession { .. } | Self::Config { .. } | Self::UnknownToken { .. } => Exit::Data,
            Self::EmptyPrompt | Self::TooLong { .. } | Self::NoText | Self::RotatesByLength => Exit::Usage,
            Self::Data(e) => e.exit(),
            _ => self.origin().map_or(Exit::Failed, Failure::exit),
        }
    }

    fn origin(&self) -> Option<&dyn Failure> {
        match self {
            Self::Engine(e) => Some(e),
            _ => None,
        }
    }
}
