//! How long a run is, and which samples each step takes: a function of the recipe and the lengths, so that a resume needs only
//! the number of the step.

use std::fmt;

use crate::data::epoch_batches;
use crate::recipe::{BatchOrder, Recipe};

/// The steps of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunSchedule {
    lengths: Vec<usize>,
    micro_batch_size: usize,
    accumulation: usize,
    order: BatchOrder,
    seed: u64,
    epochs: u64,
    max_steps: Option<u64>,
}

impl RunSchedule {
    /// The schedule of a recipe over training samples of these lengths.
    pub fn new(recipe: &Recipe, lengths: &[usize]) -> Self {
        Self {
            lengths: lengths.to_vec(),
            micro_batch_size: recipe.train.micro_batch_size,
            accumulation: recipe.train.gradient_accumulation_steps,
            order: recipe.data.order,
            seed: recipe.train.seed,
            epochs: recipe.train.epochs,
            max_steps: recipe.train.max_steps,
        }
    }

    /// Steps of one epoch; the last one may have fewer micro-batches.
    pub fn steps_per_epoch(&self) -> u64 {
        self.lengths.len().div_ceil(self.micro_batch_size).div_ceil(self.accumulation) as u64
    }

    /// Steps of the run.
    pub fn num_steps(&self) -> u64 {
        let all = self.epochs.saturating_mul(self.steps_per_epoch());
        self.max_steps.map_or(all, |max| max.min(all))
    }

    /// The epoch of a step, both counted from 0.
    pub fn epoch(&self, step: u64) -> u64 {
        step / self.steps_per_epoch().max(1)
    }

    /// The micro-batches of a step, counted from 0, as samples of the training split.
    pub fn micro_batches(&self, step: u64) -> Vec<Vec<usize>> {
        let (epoch, within) = (self.epoch(step), step % self.steps_per_epoch().max(1));
        let all = epoch_batches(&self.lengths, self.micro_batch_size, self.order, self.seed, epoch);
        all.into_iter().skip((within as usize).saturating_mul(self.accumulation)).take(self.accumulation).collect()
    }
}

impl fmt::Display for RunSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (steps, per_epoch) = (self.num_steps(), self.steps_per_epoch());
        let per_step = self.micro_batch_size.saturating_mul(self.accumulation);
        write!(f, "{steps} of up to {per_step} samples ({per_epoch} an epoch, {} epochs", self.epochs)?;
        match self.max_steps {
            Some(max) if max > steps => write!(f, "; fewer than max_steps = {max}: raise `train.epochs`)"),
            Some(max) => write!(f, "; max_steps = {max})"),
            None => write!(f, ")"),
        }
    }
}
