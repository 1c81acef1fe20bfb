//! How long a run is, and which samples each step takes: of recipe, lengths and the step's number alone, so that a resume needs no more.

use std::cell::RefCell;
use std::fmt;

use crate::data::epoch_batches;
use crate::recipe::{BatchOrder, BatchSize, Recipe, TrainRecipe};

#[derive(Clone, Debug)]
pub struct RunSchedule {
    lengths: Vec<usize>,
    train: TrainRecipe,
    order: BatchOrder,
    /// The epoch that was asked for last, and its micro-batches; every epoch has as many.
    batches: RefCell<(u64, Vec<Vec<usize>>)>,
}

impl RunSchedule {
    pub fn new(recipe: &Recipe, lengths: &[usize]) -> Self {
        let (train, order) = (recipe.train.clone(), recipe.data.order);
        let batches = RefCell::new((0, epoch_batches(lengths, train.batch_size, order, train.seed, 0)));
        Self { lengths: lengths.to_vec(), train, order, batches }
    }

    /// Steps of one epoch; the last one may have fewer micro-batches.
    pub fn steps_per_epoch(&self) -> u64 {
        self.batches.borrow().1.len().div_ceil(self.train.gradient_accumulation_steps) as u64
    }

    pub fn num_steps(&self) -> u64 {
        let per_epoch = self.steps_per_epoch();
        // Of 30 steps 0.1 are 3, and not 4 because the product of the floats is 3.0000000000000004.
        let begun = (self.train.epochs.fract() * per_epoch as f64 - 1e-6).ceil().max(0.0) as u64;
        let all = (self.train.epochs as u64).saturating_mul(per_epoch).saturating_add(begun).max(per_epoch.min(1));
        self.train.max_steps.map_or(all, |max| max.min(all))
    }

    /// The epoch of a step, both counted from 0.
    pub fn epoch(&self, step: u64) -> u64 {
        step / self.steps_per_epoch().max(1)
    }

    /// The micro-batches of a step, counted from 0, as samples of the training split: of all ranks, so that their number changes nothing.
    pub fn micro_batches(&self, step: u64) -> Vec<Vec<usize>> {
        let per_epoch = self.steps_per_epoch().max(1);
        let (epoch, within) = (step / per_epoch, (step % per_epoch) as usize);
        let mut batches = self.batches.borrow_mut();
        if batches.0 != epoch {
            *batches = (epoch, epoch_batches(&self.lengths, self.train.batch_size, self.order, self.train.seed, epoch));
        }
        let accumulation = self.train.gradient_accumulation_steps;
        batches.1.iter().skip(within.saturating_mul(accumulation)).take(accumulation).cloned().collect()
    }
}

impl fmt::Display for RunSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (steps, per_epoch) = (self.num_steps(), self.steps_per_epoch());
        let (per_step, what) = match self.train.batch_size {
            BatchSize::Sequences(count) => (count, "samples"),
            BatchSize::Tokens(tokens) => (tokens, "tokens"),
        };
        let per_step = per_step.saturating_mul(self.train.gradient_accumulation_steps);
        let epochs = self.train.epochs.to_string();
        let plural = if epochs == "1" { "" } else { "s" };
        write!(f, "{steps}, each of up to {per_step} {what} ({per_epoch} steps per epoch, {epochs} epoch{plural}")?;
        match self.train.max_steps {
            Some(max) if max > steps => write!(f, "; fewer than max_steps = {max}: raise `train.epochs`)"),
            Some(max) => write!(f, "; max_steps = {max})"),
            None => write!(f, ")"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(epochs: &str) -> RunSchedule {
        let text = format!("model.path = '.'\ndata = {{format = 'tokens', train = 't'}}\ntrain.epochs = {epochs}");
        let recipe = Recipe::parse(text, "r.toml".as_ref(), &[]).unwrap().recipe;
        RunSchedule::new(&recipe, &[5; 30])
    }

    #[test]
    fn a_part_of_an_epoch_has_its_part_of_the_steps() {
        for (epochs, steps) in
            [("1", 30), ("3", 90), ("0.5", 15), ("0.1", 3), ("2.1", 63), ("0.51", 16), ("1e-9", 1), ("9e18", u64::MAX)]
        {
            assert_eq!(schedule(epochs).num_steps(), steps, "{epochs}");
        }
        assert_eq!(schedule("0.5").to_string(), "15, each of up to 1 samples (30 steps per epoch, 0.5 epochs)");
        // What a step takes does not depend on where the run ends.
        assert!((0..15).all(|step| schedule("0.5").micro_batches(step) == schedule("2").micro_batches(step)));
    }
}
