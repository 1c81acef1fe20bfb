//! Files of examples become batches of token ids: formats, tokenizer, split, length limits, order.
//!
//! [`open`] reads the files that a recipe names and returns [`Splits`]; a [`Dataset`] tokenises its samples only when
//! [`Dataset::batch`] asks for them, and knows their lengths beforehand, so that [`epoch_batches`] can group samples of
//! similar length.

mod answers;
mod bad_rows;
mod batch;
mod by_length;
mod chat_template;
mod dataset;
mod encode;
mod error;
mod example;
#[cfg(test)]
mod fixtures;
mod formats;
mod guard;
mod initial_part;
mod label_tokens;
mod length_cache;
mod load_report;
mod on_too_long;
mod open;
mod question;
mod rows;
mod sample_place;
mod source;
mod split;
mod survey;
mod tokenizer;
mod train_bpe;

pub use answers::{Answer, each_answer};
pub use batch::{Batch, IGNORE, Sequence, Targets};
pub use by_length::epoch_batches;
pub use chat_template::{ChatTemplate, Message, special_tokens};
pub use dataset::Dataset;
pub use error::DataError;
pub use initial_part::InitialPartFinder;
pub use label_tokens::label_tokens;
pub use load_report::{FileReport, LengthSource, LoadReport};
pub use open::{ModelLimits, Splits, open};
pub use question::{Question, SampleGroups};
pub use sample_place::{LineOrRecord, SamplePlace};
pub use source::DataSource;
pub use survey::{SampleFate, SurveyedRow, SurveyedSample, survey};
pub use tokenizer::Tokenizer;
pub use train_bpe::{SPECIAL_TOKENS, train_bpe};
