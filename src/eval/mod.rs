//! Scores on a dataset: loss, perplexity and accuracy, overall, by length and as `LongBench` v2 reports; and the metrics of answers.

mod answer_file;
mod answers;
mod paired;
mod score;
mod scored_answer;
mod token_classes;

pub use answer_file::{ANSWERS, AnswerFile};
pub use answers::{AnswerSpec, answer, check_answers};
pub use paired::{Contribution, PairedDifference};
pub use score::{Bucket, DatasetRun, SampleLoss, Score, Scores, batches};
pub use scored_answer::{AnswerScores, ScoredAnswer};
pub use token_classes::TokenClasses;
