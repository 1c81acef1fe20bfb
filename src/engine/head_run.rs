//! The head's part of a step: where losses are due, what they add up to, and the gradient that they send down.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use tch::{Device, Tensor};

use super::{Engine, MicroBatchContext};
use crate::data::{Batch, SoftTargets, Targets};
use crate::head::{ColumnTargets, Head, Logits, Losses, SequenceLoss, SequenceTargets, SoftRows, TargetPosition, column_loss};
use crate::model::Model;
use crate::native::cuda::on_device;
use crate::ops::attention::zero_sum_of;
use crate::recipe::LossMean;
use crate::store::Waiting;
use crate::units::Fault;

/// Losses so far, and what of the model's upper end is trained.
#[derive(Debug)]
pub(super) struct HeadRun {
    /// Losses by sequence of the batch, over the columns whose figures have come to the host.
    sequences: Vec<SequenceLoss>,
    /// The loss of each target of these columns, by sequence, in ascending order of position.
    by_target: Vec<Vec<f32>>,
    /// Target positions and their losses that may still be on their way to the host.
    waiting: VecDeque<(Vec<TargetPosition>, Waiting<Tensor>)>,
    /// Gradients of the model's head parameters, in their order.
    pub(super) gradients: Vec<Tensor>,
    /// Ascending by position; within a position, sequences keep their order.
    target_positions: Vec<TargetPosition>,
    /// One over the targets of each target's sequence; empty where all targets count alike.
    sequence_weights: Vec<f64>,
    /// What a teacher predicts, by sequence; empty without one.
    soft: Vec<Arc<SoftTargets>>,
}

impl Logits for Model {
    fn of_hidden(&self, hidden_ne: &Tensor) -> Tensor {
        self.logits(&self.final_norm(hidden_ne))
    }

    fn trained(&self) -> Vec<Tensor> {
        self.head_parameters().into_iter().map(|(_, leaf)| leaf).collect()
    }

    fn num_scores(&self) -> usize {
        self.config().num_scores()
    }
}

impl HeadRun {
    /// A head that has seen no column; `context` is that of a step.
    pub(super) fn new(engine: &Engine, model: &Model, batch: &Batch, context: Option<MicroBatchContext>) -> Result<Self, Fault> {
        let target_positions = target_positions(&engine.head, batch)?;
        let has_means = context.is_some_and(|context| context.loss_mean == LossMean::Sequences);
        Ok(Self {
            sequences: vec![SequenceLoss::default(); batch.sequences.len()],
            by_target: vec![Vec::new(); batch.sequences.len()],
            waiting: VecDeque::new(),
            gradients: context.map_or_else(Vec::new, |_| model.trained().iter().map(zero_sum_of).collect()),
            sequence_weights: if has_means { sequence_weights(&target_positions) } else { Vec::new() },
            target_positions,
            soft: soft_targets(batch),
        })
    }

    /// The targets of so many positions from `start` on.
    pub(super) fn targets(&self, start: usize, tokens: usize) -> Range<usize> {
        let from = |position: usize| self.target_positions.partition_point(|p| p.position < position);
        from(start)..from(start + tokens)
    }

    /// Adds the losses of a column that begins at position `start`, from its hidden states before the final norm; with a weight, returns their
    /// gradient, if any token of it has a target.
    pub(super) fn column(
        &mut self,
        engine: &Engine,
        model: &Model,
        start: usize,
        hidden_bne: &Tensor,
        weight: Option<f64>,
    ) -> Result<Option<Tensor>, Fault> {
        let range = self.targets(start, hidden_bne.size()[1] as usize);
        let (here, sequence_weights) = (&self.target_positions[range.clone()], self.sequence_weights.get(range));
        let soft = soft_rows(&self.soft, here, hidden_bne.device());
        let places = ColumnTargets { start, target_positions: here, sequence_weights, soft: soft.as_ref() };
        let (losses, gradient) = column_loss(&engine.head, hidden_bne, places, model, weight, &mut self.gradients)?;
        self.waiting.extend(losses.into_iter().map(|block| (block.target_positions, Waiting::send(&block.loss_and_correct_2n))));
        while self.waiting.front().is_some_and(|(_, figures)| figures.has_come()) {
            self.read_next()?;
        }
        Ok(gradient)
    }

    /// Waits for all figures and returns the loss of every sequence, and of each of its targets.
    pub(super) fn finish(mut self) -> Result<(Vec<SequenceLoss>, Vec<Vec<f32>>), Fault> {
        while !self.waiting.is_empty() {
            self.read_next()?;
        }
        Ok((self.sequences, self.by_target))
    }

    /// Adds the figures that were sent first.
    fn read_next(&mut self) -> Result<(), Fault> {
        let Some((target_positions, figures)) = self.waiting.pop_front() else { return Ok(()) };
        for (target, value, correct) in (Losses { target_positions, loss_and_correct_2n: figures.on_host() }).read()? {
            let sequence = &mut self.sequences[target.sequence];
            sequence.loss_sum += value;
            sequence.targets += 1;
            sequence.correct += usize::from(correct);
            self.by_target[target.sequence].push(value as f32);
        }
        Ok(())
    }
}

pub fn target_positions(head: &Head, batch: &Batch) -> Result<Vec<TargetPosition>, Fault> {
    let mut all = Vec::new();
    for (index, sequence) in batch.sequences.iter().enumerate() {
        let targets = match &sequence.targets {
            Targets::NextToken(labels) | Targets::Distilled(labels, _) => SequenceTargets::Tokens(labels),
            Targets::Class(class) => SequenceTargets::Class { len: sequence.inputs.len(), class: *class },
        };
        all.extend(head.target_positions(index, targets)?);
    }
    all.sort_by_key(|p| p.position);
    Ok(all)
}

/// One over the number of targets of each target's sequence.
pub fn sequence_weights(target_positions: &[TargetPosition]) -> Vec<f64> {
    let mut targets = HashMap::new();
    for target in target_positions {
        *targets.entry(target.sequence).or_insert(0.0) += 1.0;
    }
    target_positions.iter().map(|target| 1.0 / targets[&target.sequence]).collect()
}

/// What a teacher predicts in a batch, by sequence; empty unless it has been asked for all.
pub fn soft_targets(batch: &Batch) -> Vec<Arc<SoftTargets>> {
    batch.sequences.iter().map(|sequence| sequence.targets.soft().cloned()).collect::<Option<_>>().unwrap_or_default()
}

/// The teacher's rows for some target positions; `None` without a teacher.
pub fn soft_rows(soft: &[Arc<SoftTargets>], target_positions: &[TargetPosition], device: Device) -> Option<SoftRows> {
    let top_k = soft.first()?.top_k;
    let (mut tokens, mut log_probs) = (Vec::new(), Vec::new());
    for target in target_positions {
        let row = target.rank * top_k..(target.rank + 1) * top_k;
        tokens.extend(soft[target.sequence].tokens[row.clone()].iter().map(|&token| i64::from(token)));
        log_probs.extend_from_slice(&soft[target.sequence].log_probs[row]);
    }
    let size = [target_positions.len() as i64, top_k as i64];
    Some(SoftRows { token_nk: on_device(&tokens, device).view(size), log_prob_nk: on_device(&log_probs, device).view(size) })
}
