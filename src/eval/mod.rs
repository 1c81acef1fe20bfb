//! Scores on a dataset: loss, perplexity and accuracy, overall and by length.

mod score;

pub use score::{Bucket, EvalError, Score, Scores, score};
