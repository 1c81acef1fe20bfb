//! One optimiser step: micro-batches through the engine, their gradients summed, checked, clipped and applied.

use std::collections::BTreeMap;

use tch::Tensor;

use super::TrainError;
use super::retreat::RetryingEngine;
use crate::data::Batch;
use crate::engine::{ChunkKey, EngineError, MemoryByPart, MicroBatchContext, Observer};
use crate::files;
use crate::model::{DropoutKey, Model};
use crate::optim::{Optimizer, clip_grad_norm, in_one_place};
use crate::recipe::Recipe;
use crate::store::bytes_of;
use crate::units::Bytes;

/// A model with what trains it.
pub struct Learner<'a> {
    /// What is trained, and what decides dropout, chunk sizes and clipping.
    pub recipe: &'a Recipe,
    /// The model.
    pub model: &'a Model,
    /// What computes its gradients.
    pub engine: &'a mut RetryingEngine,
    /// What applies them.
    pub optimizer: &'a mut dyn Optimizer,
}

/// What a step came to.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOutcome {
    /// Mean loss, nats per target.
    pub loss: f64,
    /// The routers' load-balance loss, before its weight, as the mean of the micro-batches; `None` where it has none.
    pub router_loss: Option<f64>,
    /// Of all sequences.
    pub targets: usize,
    /// Likewise.
    pub tokens: usize,
    /// Targets that the model would have chosen.
    pub correct: usize,
    /// Norm of the gradient before it was clipped.
    pub grad_norm: f64,
    /// Hash of the choices, those of the micro-batches in their order.
    pub replay_log: String,
}

/// Where in a run a micro-batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatchPosition {
    /// Of the step, from 1.
    pub step: u64,
    /// Index, and how many the step has.
    pub micro_batch: (usize, usize),
}

/// Who watches steps: the engine's events, and what comes before and after them.
pub trait StepWatch: Observer {
    /// A micro-batch begins; `memory` says what the engine holds at rest, and how much of gradients the earlier ones have left.
    fn begin(&mut self, at: MicroBatchPosition, memory: &dyn Fn() -> (MemoryByPart, Bytes)) {
        let _ = (at, memory);
    }

    /// All gradients are there, and `memory` with them; clipping and the update follow.
    fn optimizer(&mut self, memory: &dyn Fn() -> MemoryByPart) {
        let _ = memory;
    }

    /// The step is made.
    fn end(&mut self) {}
}

/// What all micro-batches of a step give together.
struct StepGradients {
    /// What is known before the gradients are clipped.
    outcome: StepOutcome,
    /// By parameter, of the mean loss of the global batch.
    gradients: Vec<(String, Tensor)>,
}

impl Learner<'_> {
    /// Makes the step after `step` others: micro-batches, clipping, update.
    pub fn step(
        &mut self,
        batches: &[Batch],
        step: u64,
        learning_rate: f64,
        watch: &mut dyn StepWatch,
    ) -> Result<StepOutcome, TrainError> {
        let StepGradients { outcome, mut gradients } = self.gradients(batches, step, watch)?;
        watch.optimizer(&|| {
            let mut memory = self.engine.engine().memory_at_rest(self.model);
            // What several micro-batches have summed up is known to whoever watched the last of them begin.
            if batches.len() == 1 {
                memory.parameter_gradients += bytes_of(gradients.iter().map(|(_, gradient)| gradient));
            }
            memory
        });
        let grad_norm = clip_grad_norm(&mut gradients, self.recipe.train.max_grad_norm);
        self.optimizer.step(&self.model.parameters(), &gradients, learning_rate);
        watch.end();
        Ok(StepOutcome { grad_norm, ..outcome })
    }

    /// The gradient of the mean loss over the targets of all `batches` together, so that 8 × 1 = 1 × 8.
    fn gradients(&mut self, batches: &[Batch], step: u64, watch: &mut dyn StepWatch) -> Result<StepGradients, TrainError> {
        let targets: usize = batches.iter().map(Batch::num_targets).sum();
        if targets == 0 {
            return Err(EngineError::NoTargets.into());
        }
        let mut total: BTreeMap<String, Tensor> = BTreeMap::new();
        let (mut loss, mut correct, mut suspects, mut logs) = (0.0, 0, Vec::new(), Vec::new());
        let mut router_loss = None;
        for (index, batch) in batches.iter().enumerate() {
            let at = MicroBatchPosition { step: step + 1, micro_batch: (index, batches.len()) };
            watch.begin(at, &|| (self.engine.engine().memory_at_rest(self.model), bytes_of(total.values())));
            let part = self.engine.gradients(self.model, batch, self.context(step, targets, batches.len()), watch)?;
            let losses = batch.sequences.iter().zip(&part.losses);
            suspects.extend(losses.filter(|(_, loss)| !loss.loss_sum.is_finite()).map(|(sequence, _)| sequence.sample));
            loss += part.losses.iter().map(|r| r.loss_sum).sum::<f64>();
            correct += part.losses.iter().map(|r| r.correct).sum::<usize>();
            router_loss = part.router_loss.map(|loss| router_loss.unwrap_or(0.0) + loss / batches.len() as f64);
            logs.push(part.log.hash());
            for (name, gradient) in part.gradients {
                match total.get_mut(&name) {
                    Some(sum) => drop(sum.g_add_(&gradient)),
                    None => drop(total.insert(name, gradient)),
                }
            }
        }
        refuse_not_finite(step + 1, batches, (loss, suspects), &total)?;
        let tokens = batches.iter().map(Batch::num_tokens).sum();
        if let Some(most) = self.recipe.train.max_loss
            && loss / targets as f64 > most
        {
            return Err(TrainError::LossTooHigh { step: step + 1, loss: loss / targets as f64, most });
        }
        // As many digits as tell the steps of any run apart.
        let replay_log = files::hash_parts(&logs)[..16].to_owned();
        let loss = loss / targets as f64;
        let outcome = StepOutcome { loss, router_loss, targets, tokens, correct, grad_norm: 0.0, replay_log };
        Ok(StepGradients { outcome, gradients: total.into_iter().collect() })
    }

    /// Of each of so many micro-batches of the step after `step` others, which has so many targets in all.
    fn context(&self, step: u64, targets: usize, micro_batches: usize) -> MicroBatchContext {
        let seed = self.recipe.train.seed;
        let has_dropout = self.recipe.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0);
        MicroBatchContext {
            weight: 1.0 / targets as f64,
            router_weight: self.recipe.train.router_aux_loss_coef / micro_batches as f64,
            dropout: has_dropout.then_some(DropoutKey { seed, step }),
            chunk_sizes: Some(ChunkKey { seed, step }),
        }
    }
}

/// The name of the first of some tensors that holds a number which is not finite. One wait for the device, where all are finite.
pub(super) fn first_not_finite<'a>(tensors: impl Iterator<Item = (&'a str, &'a Tensor)>) -> Option<&'a str> {
    let tensors: Vec<(&str, &Tensor)> = tensors.collect();
    let is_finite = |(_, tensor): &(&str, &Tensor)| tensor.isfinite().all();
    let all = in_one_place(tensors.iter().map(is_finite).collect());
    if all.is_empty() || Tensor::stack(&all, 0).all().int64_value(&[]) == 1 {
        return None;
    }
    tensors.iter().zip(&all).find(|(_, is_finite)| is_finite.int64_value(&[]) == 0).map(|((name, _), _)| *name)
}

/// Names the samples whose loss isn't finite, else all of them, and the first matrix whose gradient isn't.
fn refuse_not_finite(
    step: u64,
    batches: &[Batch],
    (loss, mut samples): (f64, Vec<u64>),
    gradients: &BTreeMap<String, Tensor>,
) -> Result<(), TrainError> {
    let first = first_not_finite(gradients.iter().map(|(name, gradient)| (&name[..], gradient)));
    let matrix = first.map(|name| format!("the gradient of `{name}`"));
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
