//! Scores on a dataset: loss, perplexity and accuracy, overall, by length and as `LongBench` v2 reports; and the metrics of answers.

mod answer_file;
mod answers;
mod score;
mod scored_answer;

use crate::units::{Fault, FaultKind};
pub use answer_file::{ANSWERS, AnswerFile};
pub use answers::{AnswerSpec, answer, check_answers};
pub use score::{Bucket, Score, Scores, batches, score};
pub use scored_answer::{AnswerScores, ScoredAnswer};

/// Whether an error only says that this rank or another was asked to stop.
pub fn is_given_up(error: &Fault) -> bool {
    error.kind() == FaultKind::Interrupted
}
