//! What the ranks tell each other of a step, and what comes of it: the same on every rank, and in the order of one alone.

use serde::{Deserialize, Serialize};

use super::MicroBatchAssignment;
use super::evicted::evicted_by_layer;
use super::oom_fallback::OomFallback;
use super::run_ranks::SignalRequests;
use crate::data::Batch;
use crate::engine::MicroBatchGradients;
use crate::files;
use crate::head::SequenceLoss;
use crate::recipe::LossMean;
use crate::report::metrics::{Evicted, StepMetrics};
use crate::units::Fault;

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RankReport {
    pub(super) micro_batches: Vec<MicroBatchReport>,
    pub(super) seconds: f64,
    /// The peak of its process so far, bytes.
    pub(super) peak_memory: u64,
    pub(super) fallback: OomFallback,
    pub(super) asked: SignalRequests,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct MicroBatchReport {
    /// The micro-batch's index among those of the step.
    index: usize,
    tokens: usize,
    correct: usize,
    /// The sum of the losses of targets, or of the means of sequences. As bits: it may be no number.
    loss: u64,
    router_loss: Option<u64>,
    replay_log: String,
    evicted: Vec<Evicted>,
    samples: Vec<u64>,
    /// The samples whose loss is not finite.
    suspects: Vec<u64>,
}

impl MicroBatchReport {
    pub(super) fn new(index: usize, batch: &Batch, made: &MicroBatchGradients, mean: LossMean) -> Result<Self, Fault> {
        let over = |loss: &SequenceLoss| if mean == LossMean::Sequences { loss.targets.max(1) as f64 } else { 1.0 };
        let losses = batch.sequences.iter().zip(&made.losses);
        let suspects = losses.filter(|(_, loss)| !loss.loss_sum.is_finite()).map(|(sequence, _)| sequence.sample);
        Ok(Self {
            index,
            tokens: batch.num_tokens(),
            correct: made.losses.iter().map(|loss| loss.correct).sum(),
            loss: made.losses.iter().map(|loss| loss.loss_sum / over(loss)).sum::<f64>().to_bits(),
            router_loss: made.router_loss.map(f64::to_bits),
            replay_log: made.log.hash(),
            evicted: evicted_by_layer(&made.log)?,
            samples: batch.sequences.iter().map(|sequence| sequence.sample).collect(),
            suspects: suspects.collect(),
        })
    }
}

/// The micro-batches of all ranks, in their order.
fn micro_batches(ranks: &[RankReport]) -> Vec<&MicroBatchReport> {
    let mut all: Vec<_> = ranks.iter().flat_map(|rank| &rank.micro_batches).collect();
    all.sort_by_key(|micro_batch| micro_batch.index);
    all
}

/// The losses of a step together, as its micro-batches give them.
pub(super) fn loss_sum(ranks: &[RankReport]) -> f64 {
    micro_batches(ranks).into_iter().map(|micro_batch| f64::from_bits(micro_batch.loss)).sum()
}

/// The samples whose loss is not finite, else all.
pub(super) fn suspects(ranks: &[RankReport]) -> Vec<u64> {
    let all = micro_batches(ranks);
    let suspects: Vec<u64> = all.iter().flat_map(|micro_batch| micro_batch.suspects.clone()).collect();
    if suspects.is_empty() { all.iter().flat_map(|micro_batch| micro_batch.samples.clone()).collect() } else { suspects }
}

/// The figures of a step, but for those of its update and its time. Layers that have `slots` are the policy's.
pub(super) fn metrics_of(ranks: &[RankReport], assigned: &MicroBatchAssignment, slots: &[Option<usize>]) -> StepMetrics {
    let (all, targets) = (micro_batches(ranks), assigned.targets);
    let loss = loss_sum(ranks) / assigned.losses as f64;
    let router_losses = all.iter().filter_map(|micro_batch| micro_batch.router_loss);
    let logs: Vec<&String> = all.iter().map(|micro_batch| &micro_batch.replay_log).collect();
    let by_layer = all.iter().map(|micro_batch| micro_batch.evicted.clone());
    let sum = |a: Vec<Evicted>, b: Vec<Evicted>| a.into_iter().zip(b).map(|(a, b)| a.plus(b)).collect();
    let by_layer = by_layer.reduce(sum).unwrap_or_default();
    let of_policy = by_layer.iter().zip(slots).filter(|(_, slots)| slots.is_some()).map(|(layer, _)| *layer);
    let evicted = of_policy.reduce(Evicted::plus);
    let correct: usize = all.iter().map(|micro_batch| micro_batch.correct).sum();
    let slowest = ranks.iter().map(|rank| rank.seconds).fold(0.0, f64::max);
    let busy: f64 = ranks.iter().map(|rank| rank.seconds).sum();
    StepMetrics {
        loss: Some(loss),
        router_loss: router_losses.map(|bits| f64::from_bits(bits) / all.len() as f64).reduce(|sum, loss| sum + loss),
        accuracy: Some(correct as f64 / targets as f64),
        tokens: all.iter().map(|micro_batch| micro_batch.tokens as u64).sum(),
        targets: targets as u64,
        // As many digits as tell the steps of any run apart.
        replay_log: Some(files::hash_parts(&logs)[..16].to_owned()),
        evicted: evicted.and_then(|sums| sums.share()),
        mean_stay: evicted.and_then(|sums| sums.mean_stay()),
        evicted_by_layer: by_layer.iter().filter_map(Evicted::share).collect(),
        mean_stay_by_layer: by_layer.iter().map(Evicted::mean_stay).collect(),
        peak_memory: ranks.iter().map(|rank| rank.peak_memory).max().unwrap_or(0),
        idle: (ranks.len() > 1 && slowest > 0.0).then(|| 1.0 - busy / (slowest * ranks.len() as f64)),
        ..StepMetrics::default()
    }
}
