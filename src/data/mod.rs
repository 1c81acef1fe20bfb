//! Files of examples become batches of token ids: formats, tokenizer, split, length limits, order.
//!
//! `open` reads the files that a recipe names, tokenises them on all cores unless an earlier start has left their tokens, and returns
//! [`Splits`]; a [`Dataset`] reads the tokens of its samples from a mapped file when [`Dataset::batch`] asks for them, and knows their lengths
//! beforehand, so that [`epoch_batches`] can group samples of similar length.

mod answers;
mod arrow_file;
mod auto_tokenizer;
mod bad_rows;
mod batch;
mod by_length;
mod chat;
mod dataset;
mod encode;
mod encoded_rows;
mod encoded_sample;
mod example;
mod faults;
#[cfg(test)]
mod fixtures;
mod formats;
mod guard;
mod in_order;
mod initial_part;
mod label_tokens;
mod load_report;
mod look;
mod media;
mod on_too_long;
mod open;
mod question;
mod rows;
mod sample_place;
mod sets;
mod source;
mod split;
mod survey;
mod token_cache;
mod token_file;
mod tokenizer;
mod tokenizer_size;
mod train_bpe;

pub use answers::{Answer, each_answer};
pub use auto_tokenizer::auto_tokenizer_differs;
pub use batch::{Batch, IGNORE, Sequence, SoftTargets, Targets};
pub use by_length::{consecutive, epoch_batches, largest_batches, share};
pub use chat::{
    ChatPrompt, ChatTemplates, Conversation, TemplateFault, become_renderer, message, render_in_children_of, special_tokens,
    tools_of,
};
pub use dataset::Dataset;
pub use encoded_rows::SampleRow;
pub use formats::formats;
pub use initial_part::InitialPartFinder;
pub use label_tokens::label_tokens;
pub use load_report::FileReport;
pub use look::{ColumnLook, FileLook, look};
pub use on_too_long::{LengthCounts, LengthOutcome};
pub use open::{DataRequest, ModelLimits, Watch, open};
pub use question::{FollowUp, Question, SampleGroups};
pub use rows::SplitName;
pub use sample_place::{LineOrRecord, SamplePlace};
pub use sets::Splits;
pub use source::DataSource;
pub use survey::{Survey, SurveyedSample, survey};
pub use tokenizer::Tokenizer;
pub use train_bpe::{SPECIAL_TOKENS, train_bpe};
