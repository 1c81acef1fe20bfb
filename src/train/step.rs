//! One optimiser step: micro-batches through the engine, their gradients summed, checked, clipped and applied.

use std::collections::BTreeMap;

use tch::Tensor;

use super::TrainError;
use super::profile::{MicroBatchPosition, StepWatch};
use super::retreat::RetryingEngine;
use crate::data::Batch;
use crate::engine::{ChunkKey, Engine, EngineError, MemoryByPart, MicroBatchContext};
use crate::files;
use crate::model::{DropoutKey, Model};
use crate::store::bytes_of;

/// What a step has to show.
#[derive(Debug)]
pub(super) struct StepGradients {
    /// Mean loss, nats per target.
    pub(super) loss: f64,
    pub(super) targets: usize,
    pub(super) tokens: usize,
    pub(super) correct: usize,
    /// By parameter, of the mean loss of the global batch.
    pub(super) gradients: Vec<(String, Tensor)>,
    /// Hash of the choices, those of the micro-batches in their order.
    pub(super) replay_log: String,
}

impl StepGradients {
    /// What engine and step hold together before the update, after so many micro-batches: what several have summed up is known to
    /// whoever watched the last of them.
    pub(super) fn memory(&self, (engine, model): (&Engine, &Model), micro_batches: usize) -> MemoryByPart {
        let mut memory = engine.memory_at_rest(model);
        if micro_batches == 1 {
            memory.parameter_gradients += bytes_of(self.gradients.iter().map(|(_, gradient)| gradient));
        }
        memory
    }
}

/// The gradient of the mean loss over the targets of all `batches` together, so that 8 × 1 = 1 × 8.
pub(super) fn gradients(
    (tiled, model): (&mut RetryingEngine, &Model),
    batches: &[Batch],
    step: u64,
    (dropout, chunk_sizes): (Option<DropoutKey>, ChunkKey),
    watch: &mut StepWatch<'_>,
) -> Result<StepGradients, TrainError> {
    let targets: usize = batches.iter().map(Batch::num_targets).sum();
    if targets == 0 {
        return Err(EngineError::NoTargets.into());
    }
    let context = MicroBatchContext { weight: 1.0 / targets as f64, dropout, chunk_sizes: Some(chunk_sizes) };
    let mut total: BTreeMap<String, Tensor> = BTreeMap::new();
    let (mut loss, mut correct, mut suspects, mut logs) = (0.0, 0, Vec::new(), Vec::new());
    for (index, batch) in batches.iter().enumerate() {
        let at = MicroBatchPosition { step, micro_batch: (index, batches.len()) };
        watch.begin(at, || (tiled.engine().memory_at_rest(model), bytes_of(total.values())));
        let part = tiled.gradients(model, batch, context, watch)?;
        let losses = batch.sequences.iter().zip(&part.losses);
        suspects.extend(losses.filter(|(_, loss)| !loss.loss_sum.is_finite()).map(|(sequence, _)| sequence.sample));
        loss += part.losses.iter().map(|r| r.loss_sum).sum::<f64>();
        correct += part.losses.iter().map(|r| r.correct).sum::<usize>();
        logs.push(part.log.hash());
        for (name, gradient) in part.gradients {
            match total.get_mut(&name) {
                Some(sum) => drop(sum.g_add_(&gradient)),
                None => drop(total.insert(name, gradient)),
            }
        }
    }
    refuse_not_finite(step, batches, (loss, suspects), &total)?;
    let tokens = batches.iter().map(Batch::num_tokens).sum();
    // As many digits as tell the steps of any run apart.
    let replay_log = files::hash_parts(&logs)[..16].to_owned();
    Ok(StepGradients {
        loss: loss / targets as f64,
        targets,
        tokens,
        correct,
        gradients: total.into_iter().collect(),
        replay_log,
    })
}

/// Names the samples whose loss isn't finite, else all of them, and the first matrix whose gradient isn't.
fn refuse_not_finite(
    step: u64,
    batches: &[Batch],
    (loss, mut samples): (f64, Vec<u64>),
    gradients: &BTreeMap<String, Tensor>,
) -> Result<(), TrainError> {
    let is_finite = |t: &Tensor| t.isfinite().all();
    let all: Vec<Tensor> = gradients.values().map(is_finite).collect();
    // One wait for the device; which matrix it was is asked only where one was not finite.
    let are_finite = all.is_empty() || Tensor::stack(&all, 0).all().int64_value(&[]) == 1;
    let first = || gradients.keys().zip(&all).find(|(_, is_finite)| is_finite.int64_value(&[]) == 0);
    let matrix = (!are_finite).then(first).flatten().map(|(name, _)| format!("the gradient of `{name}`"));
    let what = match (loss.is_finite(), matrix) {
        (true, None) => return Ok(()),
        (true, Some(matrix)) => matrix,
        (false, None) => "the loss".to_owned(),
        (false, Some(matrix)) => format!("the loss (and {matrix})"),
    };
    if samples.is_empty() {
        samples = batches.iter().flat_map(|b| b.sequences.iter().map(|r| r.sample)).collect();
    }
    Err(TrainError::NotFinite { step, what, samples })
}
