//! Texts from a model through the cache that it was trained with: sampling, stop strings, many requests at a time, sessions on disk.

mod beginning;
mod error;
mod generator;
mod likelihood;
mod limits;
mod request;
mod rules;
mod sample;
mod sampling;
mod session_file;
mod stop;

pub use beginning::{at_beginning, shared_tokens};
pub use error::{GenerationError, RuleFault};
pub use generator::Generator;
pub use likelihood::TokenLikelihood;
pub use limits::PromptLimits;
pub use request::{Continued, Finish, GenerationEvent, LikelihoodsOf, Request, RequestId};
pub use rules::GenerationRules;
pub use sampling::{Candidate, DrawPlace, SamplingRules, TokensSoFar, probabilities};
pub use session_file::{SavedSession, SessionIdentity};
pub use stop::StoppedText;
