//! Runs a dataset forward and sums up: every target weighs the same, whatever its batch.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::data::{Dataset, Targets, consecutive, share};
use crate::dist::ProcessGroup;
use crate::engine::{Engine, Observer};
use crate::head::SequenceLoss;
use crate::metrics::LongBenchV2;
use crate::model::Model;
use crate::recipe::BatchSize;
use crate::units::{Exit, Fault};

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Score {
    pub samples: usize,
    pub tokens: usize,
    pub targets: usize,
    /// Mean cross-entropy, nats per target.
    pub loss: f64,
    pub perplexity: f64,
    /// Share of targets that had the largest score of all choices.
    pub accuracy: f64,
    #[serde(skip)]
    sum: (f64, usize),
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bucket {
    /// Samples of at most so many tokens, and more than the bucket before.
    pub up_to: usize,
    pub score: Score,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Scores {
    pub overall: Score,
    /// Samples by powers of two of their length; empty buckets are left out.
    pub by_length: Vec<Bucket>,
    /// Samples by the names of their data sets, where there are several.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub by_set: BTreeMap<String, Score>,
    /// Accuracy as `LongBench` v2 reports it, of samples with a class whose data say what they are reported under.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longbench_v2: Option<LongBenchV2>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampleLoss {
    /// Index of the sample in its file, counted from 0.
    pub sample: u64,
    pub tokens: usize,
    /// Whether its target is a class.
    pub has_class: bool,
    pub loss: SequenceLoss,
    /// The cross-entropy of each target, in their order; empty where they are not kept.
    pub by_target: Vec<f32>,
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

/// The first `max_batches` batches (all, if `None`) of a data set, the shortest samples first.
pub fn batches(dataset: &Dataset, size: BatchSize, max_batches: Option<usize>) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..dataset.len()).collect();
    order.sort_by_key(|&i| (dataset.lengths()[i], i));
    let mut batches = consecutive(&order, dataset.lengths(), size);
    batches.truncate(max_batches.unwrap_or(usize::MAX));
    batches
}

/// A data set and what it is evaluated with.
#[derive(Clone, Copy)]
pub struct DatasetRun<'a> {
    pub engine: &'a Engine,
    pub model: &'a Model,
    pub dataset: &'a Dataset,
    /// Samples that run together, as [`batches`] has them.
    pub batches: &'a [Vec<usize>],
    pub world: &'a ProcessGroup,
}

impl DatasetRun<'_> {
    /// The losses of all samples in the order of the batches, on every rank; those of single targets only where they are kept.
    pub fn losses(&self, keeps_targets: bool, observer: &mut dyn Observer) -> Result<Vec<SampleLoss>, Fault> {
        let Self { dataset, batches, world, .. } = *self;
        if dataset.is_empty() {
            return Err(Fault::data(
                "there is no sample to evaluate",
                "check the split and `data.on_too_long`: every sample may have been dropped",
            ));
        }
        let of_batch = |samples: &Vec<usize>| samples.iter().map(|&sample| dataset.lengths()[sample]).sum();
        let tokens: Vec<usize> = batches.iter().map(of_batch).collect();
        let own = share(&tokens, world.size()).swap_remove(world.rank());
        let own = own.into_iter().map(|index| Ok((index, self.batch(&batches[index], keeps_targets, observer)?)));
        let mut all = world.agree("validating", own.collect::<Result<Vec<(usize, Vec<SampleLoss>)>, Fault>>())?.concat();
        all.sort_by_key(|(index, _)| *index);
        Ok(all.into_iter().flat_map(|(_, losses)| losses).collect())
    }

    fn batch(&self, samples: &[usize], keeps_targets: bool, observer: &mut dyn Observer) -> Result<Vec<SampleLoss>, Fault> {
        // The longest first: those that end leave the batch from behind.
        let batch = self.dataset.batch(&samples.iter().rev().copied().collect::<Vec<_>>())?;
        let (losses, by_target) = self.engine.target_losses(self.model, &batch, observer)?;
        let mut found = Vec::new();
        for ((sequence, loss), by_target) in batch.sequences.iter().zip(losses).zip(by_target).rev() {
            let sample = sequence.sample;
            if !loss.loss_sum.is_finite() {
                let message = format!("the loss of sample {sample} (counted from 0) is {}", loss.loss_sum);
                let hint = "the weights or the adapter may be damaged, or the dtype too narrow for them";
                return Err(Fault::new(Exit::NotFinite, message).with_hint(hint));
            }
            let by_target = if keeps_targets { by_target } else { Vec::new() };
            let has_class = matches!(sequence.targets, Targets::Class(_));
            found.push(SampleLoss { sample, tokens: sequence.inputs.len(), has_class, loss, by_target });
        }
        Ok(found)
    }

    /// Sums up the losses of all samples in their order, so that the number of ranks changes no digit.
    pub fn scores(&self, losses: &[SampleLoss]) -> Result<Scores, Fault> {
        let Self { dataset, batches, .. } = *self;
        let mut scores = Scores { overall: Score::default(), by_length: Vec::new(), by_set: BTreeMap::new(), longbench_v2: None };
        for (&SampleLoss { tokens, has_class, loss, .. }, &sample) in losses.iter().zip(batches.iter().flatten()) {
            scores.add(tokens, loss);
            if let Some(name) = dataset.set_of(sample) {
                scores.by_set.entry(name.to_owned()).or_default().add(loss, tokens);
            }
            if let (true, Some(groups)) = (has_class, dataset.groups(sample)?) {
                scores.longbench_v2.get_or_insert_with(LongBenchV2::default).add_credit(groups.by(), loss.correct as f64);
            }
        }
        Ok(scores)
    }
}

impl Scores {
    /// Adds a sequence of so many tokens, which is no shorter than those before it.
    fn add(&mut self, tokens: usize, loss: SequenceLoss) {
        let up_to = tokens.next_power_of_two();
        self.overall.add(loss, tokens);
        if self.by_length.last().is_none_or(|bucket| bucket.up_to != up_to) {
            self.by_length.push(Bucket { up_to, score: Score::default() });
        }
        if let Some(bucket) = self.by_length.last_mut() {
            bucket.score.add(loss, tokens);
        }
    }
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
