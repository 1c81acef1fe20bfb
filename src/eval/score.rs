//! Runs a dataset forward and sums up: every target weighs the same, whatever its batch.

use serde::Serialize;

use super::EvalError;
use crate::data::{Dataset, Targets, consecutive};
use crate::engine::{Engine, Observer};
use crate::head::SequenceLoss;
use crate::metrics::LongBenchV2;
use crate::model::Model;
use crate::recipe::BatchSize;

/// Sums over some samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Score {
    /// Samples.
    pub samples: usize,
    /// Tokens that were run.
    pub tokens: usize,
    /// Places with a target.
    pub targets: usize,
    /// Mean cross-entropy, nats per target.
    pub loss: f64,
    /// `exp(loss)`.
    pub perplexity: f64,
    /// Share of targets that had the largest score of all choices.
    pub accuracy: f64,
    #[serde(skip)]
    sum: (f64, usize),
}

/// Samples of similar length.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bucket {
    /// Samples of at most so many tokens, and more than the bucket before.
    pub up_to: usize,
    /// Their score.
    pub score: Score,
}

/// The result of an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scores {
    /// All samples.
    pub overall: Score,
    /// By powers of two of the length; empty buckets are left out.
    pub by_length: Vec<Bucket>,
    /// Accuracy as `LongBench` v2 reports it, of samples with a class whose data say what they are reported under.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longbench_v2: Option<LongBenchV2>,
}

impl Score {
    fn add(&mut self, sequence: SequenceLoss, tokens: usize) {
        self.samples += 1;
        self.tokens += tokens;
        self.targets += sequence.targets;
        self.sum = (self.sum.0 + sequence.loss_sum, self.sum.1 + sequence.correct);
        let targets = self.targets.max(1) as f64;
        self.loss = self.sum.0 / targets;
        self.perplexity = self.loss.exp();
        self.accuracy = self.sum.1 as f64 / targets;
    }
}

/// The first `max_batches` batches (all, if `None`) that [`score`] makes of a data set, the shortest samples first.
pub fn batches(dataset: &Dataset, size: BatchSize, max_batches: Option<usize>) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..dataset.len()).collect();
    order.sort_by_key(|&i| (dataset.lengths()[i], i));
    let mut batches = consecutive(&order, dataset.lengths(), size);
    batches.truncate(max_batches.unwrap_or(usize::MAX));
    batches
}

/// Evaluates the first `max_batches` batches (all, if `None`) of `dataset`, shortest samples first.
pub fn score(
    (engine, model): (&Engine, &Model),
    dataset: &Dataset,
    size: BatchSize,
    max_batches: Option<usize>,
    observer: &mut dyn Observer,
) -> Result<Scores, EvalError> {
    if dataset.is_empty() {
        return Err(EvalError::Empty);
    }
    let mut overall = Score::default();
    let mut by_length: Vec<Bucket> = Vec::new();
    let mut longbench_v2: Option<LongBenchV2> = None;
    for samples in batches(dataset, size, max_batches) {
        // The longest first: those that end leave the batch from behind.
        let batch = dataset.batch(&samples.iter().rev().copied().collect::<Vec<_>>())?;
        let sequences = engine.losses(model, &batch, observer)?;
        for ((sequence, loss), sample) in batch.sequences.iter().zip(sequences).rev().zip(samples.iter().copied()) {
            if !loss.loss_sum.is_finite() {
                return Err(EvalError::NotFinite { sample: sequence.sample, value: loss.loss_sum });
            }
            let (tokens, up_to) = (sequence.inputs.len(), sequence.inputs.len().next_power_of_two());
            overall.add(loss, tokens);
            if by_length.last().is_none_or(|b| b.up_to != up_to) {
                by_length.push(Bucket { up_to, score: Score::default() });
            }
            if let Some(bucket) = by_length.last_mut() {
                bucket.score.add(loss, tokens);
            }
            if let (Targets::Class(_), Some(groups)) = (&sequence.targets, dataset.groups(sample)?) {
                longbench_v2.get_or_insert_with(LongBenchV2::default).add_credit(groups.by(), loss.correct as f64);
            }
        }
    }
    Ok(Scores { overall, by_length, longbench_v2 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_weighs_the_same() {
        let mut score = Score::default();
        score.add(SequenceLoss { loss_sum: 2.0, targets: 1, correct: 1 }, 10);
        score.add(SequenceLoss { loss_sum: 4.0, targets: 3, correct: 0 }, 30);
        assert_eq!((score.samples, score.tokens, score.targets), (2, 40, 4));
        assert!((score.loss - 1.5).abs() < 1e-15 && (score.accuracy - 0.25).abs() < 1e-15);
    }
}
