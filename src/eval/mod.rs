//! Scores on a dataset: loss, perplexity and accuracy, overall, by length and as `LongBench` v2 reports; and the metrics of answers.

mod answer_file;
mod answers;
mod score;
mod scored_answer;

use crate::dist::DistError;
use crate::engine::EngineError;
use crate::units::Fault;
pub use answer_file::{ANSWERS, AnswerFile};
pub use answers::{AnswerSpec, answer, check_answers};
pub use score::{Bucket, Score, Scores, batches, score};
pub use scored_answer::{AnswerScores, ScoredAnswer};

/// Whether an error only says that this rank or another was asked to stop.
pub fn is_given_up(error: &Fault) -> bool {
    matches!(error.of_type(), Some(EngineError::GivenUp)) || matches!(error.of_type(), Some(DistError::OtherGaveUp { .. }))
}
