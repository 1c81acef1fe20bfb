//! Scores on a dataset: loss, perplexity and accuracy, overall, by length and as `LongBench` v2 reports; and the metrics of answers.

mod answer_file;
mod answers;
mod error;
mod score;

pub use answer_file::AnswerFile;
pub use answers::{AnswerScores, AnswerSpec, ScoredAnswer, answer};
pub use error::EvalError;
pub use score::{Bucket, Score, Scores, score};
