//! Scores on a dataset: loss, perplexity and accuracy, overall, by length and as `LongBench` v2 reports; and the metrics of answers.

mod answer_file;
mod answers;
mod score;
mod scored_answer;

pub use answer_file::{ANSWERS, AnswerFile};
pub use answers::{AnswerSpec, answer, check_answers};
pub use score::{Bucket, Score, Scores, batches, score};
pub use scored_answer::{AnswerScores, ScoredAnswer};
