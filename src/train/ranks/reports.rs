//! What the ranks tell each other of a step, and what comes of it: the same on every rank, and in the order of one alone.

use serde::{Deserialize, Serialize};

use super::super::evicted::evicted_by_layer;
use super::super::oom_fallback::OomFallback;
use super::run_ranks::Asked;
use crate::data::Batch;
use crate::engine::MicroBatchGradients;
use crate::files;
use crate::report::evicted::Evicted;
use crate::units::Fault;

/// A rank's micro-batches of a step.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::train) struct RankReport {
    pub(in crate::train) micro_batches: Vec<MicroBatchReport>,
    pub(in crate::train) seconds: f64,
    /// The peak of its process so far, bytes.
    pub(in crate::train) peak_memory: u64,
    /// How small its cells have become.
    pub(in crate::train) fallback: OomFallback,
    pub(in crate::train) asked: Asked,
}

#[derive(Debug, Serialize, Deserialize)]
pub(in crate::train) struct MicroBatchReport {
    /// The micro-batch's index among those of the step.
    index: usize,
    tokens: usize,
    correct: usize,
    /// The sum of the losses. As bits: it may be no number.
    loss: u64,
    router_loss: Option<u64>,
    replay_log: String,
    evicted: Vec<Evicted>,
    samples: Vec<u64>,
    /// The samples whose loss is not finite.
    suspects: Vec<u64>,
}

impl MicroBatchReport {
    pub(in crate::train) fn new(index: usize, batch: &Batch, made: &MicroBatchGradients) -> Result<Self, Fault> {
        let losses = batch.sequences.iter().zip(&made.losses);
        let suspects = losses.filter(|(_, loss)| !loss.loss_sum.is_finite()).map(|(sequence, _)| sequence.sample);
        Ok(Self {
            index,
            tokens: batch.num_tokens(),
            correct: made.losses.iter().map(|loss| loss.correct).sum(),
            loss: made.losses.iter().map(|loss| loss.loss_sum).sum::<f64>().to_bits(),
            router_loss: made.router_loss.map(f64::to_bits),
            replay_log: made.log.hash(),
            evicted: evicted_by_layer(&made.log)?,
            samples: batch.sequences.iter().map(|sequence| sequence.sample).collect(),
            suspects: suspects.collect(),
        })
    }
}

/// What a step came to.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutcome {
    /// Mean loss, nats per target.
    pub loss: f64,
    /// The routers' load-balance loss, before its weight, as the mean of the micro-batches; `None` where it has none.
    pub router_loss: Option<f64>,
    pub targets: usize,
    pub tokens: usize,
    /// Targets that the model would have chosen.
    pub correct: usize,
    /// Norm of the gradient before it was clipped.
    pub grad_norm: f64,
    /// Hash of the choices, those of the micro-batches in their order.
    pub replay_log: String,
    /// What each layer has evicted.
    pub evicted: Vec<Evicted>,
    /// The largest peak of a rank's memory by then, bytes.
    pub peak_memory: u64,
    /// The part of their time that ranks have waited for the slowest; `None` for one alone.
    pub idle: Option<f64>,
}

/// The micro-batches of all ranks, in their order.
fn micro_batches(ranks: &[RankReport]) -> Vec<&MicroBatchReport> {
    let mut all: Vec<_> = ranks.iter().flat_map(|rank| &rank.micro_batches).collect();
    all.sort_by_key(|micro_batch| micro_batch.index);
    all
}

/// The losses of all targets of a step together.
pub(in crate::train) fn loss_sum(ranks: &[RankReport]) -> f64 {
    micro_batches(ranks).into_iter().map(|micro_batch| f64::from_bits(micro_batch.loss)).sum()
}

/// The samples whose loss is not finite, else all.
pub(in crate::train) fn suspects(ranks: &[RankReport]) -> Vec<u64> {
    let all = micro_batches(ranks);
    let suspects: Vec<u64> = all.iter().flat_map(|micro_batch| micro_batch.suspects.clone()).collect();
    if suspects.is_empty() { all.iter().flat_map(|micro_batch| micro_batch.samples.clone()).collect() } else { suspects }
}

impl StepOutcome {
    /// What a step came to that has so many targets.
    pub(in crate::train) fn of(ranks: &[RankReport], targets: usize) -> Self {
        let all = micro_batches(ranks);
        let mean = |sum: f64, bits: u64| sum + f64::from_bits(bits) / all.len() as f64;
        let router_loss = all.iter().filter_map(|micro_batch| micro_batch.router_loss);
        let logs: Vec<&String> = all.iter().map(|micro_batch| &micro_batch.replay_log).collect();
        let by_layer = all.iter().map(|micro_batch| micro_batch.evicted.clone());
        let sum = |a: Vec<Evicted>, b: Vec<Evicted>| a.into_iter().zip(b).map(|(a, b)| a + b).collect();
        let slowest = ranks.iter().map(|rank| rank.seconds).fold(0.0, f64::max);
        let busy: f64 = ranks.iter().map(|rank| rank.seconds).sum();
        Self {
            loss: loss_sum(ranks) / targets as f64,
            router_loss: router_loss.fold(None, |sum, bits| Some(mean(sum.unwrap_or(0.0), bits))),
            targets,
            tokens: all.iter().map(|micro_batch| micro_batch.tokens).sum(),
            correct: all.iter().map(|micro_batch| micro_batch.correct).sum(),
            grad_norm: 0.0,
            // As many digits as tell the steps of any run apart.
            replay_log: files::hash_parts(&logs)[..16].to_owned(),
            evicted: by_layer.reduce(sum).unwrap_or_default(),
            peak_memory: ranks.iter().map(|rank| rank.peak_memory).max().unwrap_or(0),
            idle: (ranks.len() > 1 && slowest > 0.0).then(|| 1.0 - busy / (slowest * ranks.len() as f64)),
        }
    }
}
