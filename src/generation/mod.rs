//! Texts from a model through the cache that it was trained with: sampling, stop strings, many requests at a time, sessions on disk.

mod generator;
mod likelihood;
mod limits;
mod request;
mod rules;
mod sample;
mod sampling;
mod session_file;
mod stop;

use crate::units::{Fault, FaultKind};

pub use generator::Generator;
pub use likelihood::TokenLikelihood;
pub use limits::PromptLimits;
pub use request::{Continued, Finish, GenerationEvent, LikelihoodsOf, Request, RequestId, WholeText, shared_tokens};
pub use rules::GenerationRules;
pub use sampling::{Candidate, DrawPlace, SamplingRules, TokensSoFar, probabilities};
pub use session_file::{SavedSession, SessionIdentity};
pub use stop::StoppedText;

fn empty_prompt() -> Fault {
    Fault::usage("the prompt has no tokens", "give a text, or tokens").of_kind(FaultKind::BadPrompt)
}

/// A session can not be kept where what it has read depends on the length of the whole.
pub fn rotates_by_length() -> Fault {
    let message = "the rotary embeddings of this model depend on the length of the whole text, so that no session can be kept";
    Fault::usage(message, "give document and question together with each `--prompt-file`")
}
