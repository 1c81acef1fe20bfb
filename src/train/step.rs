//! One optimiser step: micro-batches through the engine, their gradients summed, checked, clipped and applied.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use tch::{Tensor, no_grad};

use super::meter::StepMeter;
use super::rank_reports::{MicroBatchReport, RankReport, loss_sum, metrics_of, suspects};
use super::{MicroBatchAssignment, RunRanks};
use crate::dist::ProcessGroup;
use crate::engine::{Engine, MemoryPart, MemoryPlace, MicroBatchContext};
use crate::measure::MicroBatchPosition;
use crate::model::Model;
use crate::native::peak_resident;
use crate::ops::attention::zero_sum_of;
use crate::optim::{Optimizer, clip_grad_norm, in_one_place};
use crate::recipe::{OnNonFinite, Recipe, TrainRecipe};
use crate::report::metrics::StepMetrics;
use crate::store::bytes_of;
use crate::units::{Exit, Fault, FaultKind, StepKey};

/// A model with what makes its training steps.
pub struct TrainStep<'a> {
    /// What is trained, and what decides dropout, chunk sizes and clipping.
    pub recipe: &'a Recipe,
    pub model: &'a Model,
    pub engine: &'a mut Engine,
    pub optimizer: &'a mut Optimizer,
    pub ranks: &'a RunRanks,
}

impl TrainStep<'_> {
    /// Makes the step after `step` others: micro-batches, clipping, update.
    pub fn step(
        &mut self,
        assigned: &MicroBatchAssignment,
        step: u64,
        learning_rate: f64,
        meter: &mut StepMeter<'_>,
    ) -> Result<StepMetrics, Fault> {
        let (metrics, mut gradients) = self.gradients(assigned, step, meter)?;
        meter.optimizer(&|| {
            let mut memory = self.engine.memory_at_rest();
            // What several micro-batches have summed up is known to whoever watched the last of them begin.
            if assigned.batches.len() == 1 {
                let all = bytes_of(gradients.iter().map(|(_, gradient)| gradient));
                memory.add(MemoryPart::Gradients, MemoryPlace::Device, all);
            }
            memory
        });
        let grad_norm = clip_grad_norm(&mut gradients, self.recipe.train.max_grad_norm);
        self.optimizer.step(&self.model.parameters(), &gradients, learning_rate);
        meter.end();
        Ok(StepMetrics { grad_norm: Some(grad_norm), learning_rate: Some(learning_rate), ..metrics })
    }

    /// The gradient of the mean loss over all micro-batches of all ranks together, so that 8 × 1 = 1 × 8; and what is known before it is clipped.
    fn gradients(
        &mut self,
        assigned: &MicroBatchAssignment,
        step: u64,
        meter: &mut StepMeter<'_>,
    ) -> Result<(StepMetrics, Vec<(String, Tensor)>), Fault> {
        if assigned.targets == 0 {
            return Err(without_targets(step + 1, assigned));
        }
        let mut gradients = BTreeMap::new();
        let made = self.gradients_of_rank(assigned, step, &mut gradients, meter);
        let reports = self.ranks.world.agree("making a step", made)?;
        self.ranks.agree(reports.iter().map(|rank| rank.asked));
        // All go on with the smallest cells of any rank.
        self.engine.fall_back_to(self.model, reports.iter().map(|rank| rank.fallback).min(), meter)?;
        if self.ranks.are_several() {
            gradients = sum_over(&self.ranks.world, self.model, gradients)?;
        }
        refuse_not_finite(step + 1, &reports, &gradients)?;
        let metrics = metrics_of(&reports, assigned, &self.engine.settings().policy_slots());
        if let (Some(most), Some(loss)) = (self.recipe.train.max_loss, metrics.loss)
            && loss > most
        {
            return Err(loss_too_high(step + 1, loss, most));
        }
        Ok((metrics, gradients.into_iter().collect()))
    }

    /// What this rank's micro-batches come to. Their part of the gradient of the global batch's mean loss is added to `total`, by parameter.
    fn gradients_of_rank(
        &mut self,
        assigned: &MicroBatchAssignment,
        step: u64,
        total: &mut BTreeMap<String, Tensor>,
        meter: &mut StepMeter<'_>,
    ) -> Result<RankReport, Fault> {
        let began = Instant::now();
        let mut micro_batches = Vec::new();
        for (done, (batch, &index)) in assigned.batches.iter().zip(&assigned.indices).enumerate() {
            let at = MicroBatchPosition { step: step + 1, micro_batch: (done, assigned.batches.len()) };
            meter.begin(at, &|| (self.engine.memory_at_rest(), bytes_of(total.values())));
            let part = self.engine.gradients_that_fit(self.model, batch, self.context(step, assigned), meter)?;
            micro_batches.push(MicroBatchReport::new(index, batch, &part, self.recipe.train.loss_mean)?);
            for (name, gradient) in part.gradients {
                match total.get_mut(&name) {
                    Some(sum) => drop(sum.g_add_(&gradient)),
                    None => drop(total.insert(name, gradient)),
                }
            }
        }
        Ok(RankReport {
            micro_batches,
            seconds: began.elapsed().as_secs_f64(),
            peak_memory: peak_resident(),
            fallback: self.engine.fallback(),
            asked: self.ranks.heard(),
        })
    }

    /// What each micro-batch of the step after `step` others is run with.
    fn context(&self, step: u64, assigned: &MicroBatchAssignment) -> MicroBatchContext {
        let key = StepKey { seed: self.recipe.train.seed, step };
        let has_dropout = self.recipe.lora.as_ref().is_some_and(|lora| lora.dropout > 0.0);
        MicroBatchContext {
            weight: 1.0 / assigned.losses as f64,
            loss_mean: self.recipe.train.loss_mean,
            router_weight: self.recipe.train.router_aux_loss_coef / assigned.micro_batches as f64,
            dropout: has_dropout.then_some(key),
            chunk_sizes: Some(key),
        }
    }
}

/// The sum of `own` over all ranks, by parameter: parts of flat buffers, one for each kind of number, so that ranks meet once a step. A rank
/// that has run nothing adds nothing.
fn sum_over(world: &ProcessGroup, model: &Model, own: BTreeMap<String, Tensor>) -> Result<BTreeMap<String, Tensor>, Fault> {
    let nothing = || model.parameters().into_iter().map(|(name, parameter)| (name, zero_sum_of(&parameter))).collect();
    let own = if own.is_empty() { nothing() } else { own };
    let alike = |gradient: &Tensor| (gradient.kind(), gradient.device());
    let mut groups: Vec<Vec<(String, Tensor)>> = Vec::new();
    for (name, gradient) in own {
        match groups.iter_mut().find(|group| alike(&group[0].1) == alike(&gradient)) {
            Some(group) => group.push((name, gradient)),
            None => groups.push(vec![(name, gradient)]),
        }
    }
    let mut sums = BTreeMap::new();
    for group in groups {
        let (names, gradients): (Vec<String>, Vec<Tensor>) = group.into_iter().unzip();
        let sizes: Vec<Vec<i64>> = gradients.iter().map(Tensor::size).collect();
        let flat = no_grad(|| Tensor::cat(&gradients.into_iter().map(|own| own.flatten(0, -1)).collect::<Vec<_>>(), 0));
        world.sum(&flat)?;
        let parts = flat.split_with_sizes(sizes.iter().map(|size| size.iter().product()).collect::<Vec<i64>>(), 0);
        sums.extend(names.into_iter().zip(parts.iter().zip(&sizes).map(|(part, size)| part.view(&size[..]))));
    }
    Ok(sums)
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
fn refuse_not_finite(step: u64, ranks: &[RankReport], gradients: &BTreeMap<String, Tensor>) -> Result<(), Fault> {
    let first = first_not_finite(gradients.iter().map(|(name, gradient)| (&name[..], gradient)));
    let matrix = first.map(|name| format!("the gradient of `{name}`"));
    let what = match (loss_sum(ranks).is_finite(), matrix) {
        (true, None) => return Ok(()),
        (true, Some(matrix)) => matrix,
        (false, None) => "the loss".to_owned(),
        (false, Some(matrix)) => format!("the loss (and {matrix})"),
    };
    let message = format!("step {step}: {what} is not finite, in {}", listed_samples(&suspects(ranks)));
    let hint = "what was saved before is intact: look at these samples and at the model's weights, or begin again with a lower \
                `optimizer.learning_rate`";
    Err(not_finite(step, message, hint))
}

/// A step whose loss, gradient or update a run can't go on with.
pub(super) fn not_finite(step: u64, message: String, hint: &str) -> Fault {
    Fault::new(Exit::NotFinite, message).with_hint(hint).of_kind(FaultKind::NotFinite { step })
}

fn without_targets(step: u64, assigned: &MicroBatchAssignment) -> Fault {
    let sequences = assigned.batches.iter().flat_map(|batch| &batch.sequences);
    let samples = listed_samples(&sequences.map(|sequence| sequence.sample).collect::<Vec<_>>());
    Fault::data(format!("step {step}: no token has a target, in {samples}"), "look at these samples: every step needs a target")
}

/// The loss of a step is above the recipe's bound; the optimiser is untouched.
fn loss_too_high(step: u64, loss: f64, most: f64) -> Fault {
    let message = format!("step {step}: the loss is {loss:.4}, above `train.max_loss` = {most}");
    let hint = "what was saved before is intact: look at the data of this step, begin again with a lower `optimizer.learning_rate`, or \
                resume with `--set train.on_non_finite=rollback`";
    not_finite(step, message, hint)
}

/// The step that an error lost is left out from now on, where the recipe's way of it is `way` and not too many before it were; else it fails.
pub(super) fn leave_out(skipped: &mut BTreeSet<u64>, error: Fault, way: OnNonFinite, recipe: &TrainRecipe) -> Result<u64, Fault> {
    let FaultKind::NotFinite { step } = error.kind() else { return Err(error) };
    let in_a_row = (1..step).rev().take_while(|before| skipped.contains(before)).count();
    if recipe.on_non_finite != way || in_a_row >= recipe.max_skipped_steps {
        return Err(error);
    }
    skipped.insert(step);
    Ok(step)
}

fn listed_samples(samples: &[u64]) -> String {
    if samples.is_empty() {
        return "samples of other ranks".to_owned();
    }
    let numbers: Vec<String> = samples.iter().take(8).map(ToString::to_string).collect();
    let more = if samples.len() > 8 { format!(" and {} more", samples.len() - 8) } else { String::new() };
    format!("sample{} {}{more} (counted from 0)", if samples.len() == 1 { "" } else { "s" }, numbers.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_named_as_far_as_a_rank_has_them() {
        assert_eq!(listed_samples(&[3]), "sample 3 (counted from 0)");
        let assigned = MicroBatchAssignment { batches: Vec::new(), indices: Vec::new(), micro_batches: 1, targets: 0, losses: 0 };
        let error = without_targets(3, &assigned).to_string();
        assert_eq!(error, "step 3: no token has a target, in samples of other ranks");
    }

    #[test]
    fn as_many_in_a_row_as_the_recipe_allows() {
        let text = "model.path = '.'\ndata = {format = 'tokens', train = 't'}\nkv_cache = {cache_length = 8, chunk_size = 4}\n\
                    train = {on_non_finite = 'skip', max_skipped_steps = 2}";
        let recipe = Recipe::parse(text.to_owned(), "r.toml".as_ref(), &[]).unwrap().recipe.train;
        let lost = |step| loss_too_high(step, 9.0, 8.0);
        let mut skipped = BTreeSet::new();
        let kept = [3, 4, 5, 6, 9].map(|step| leave_out(&mut skipped, lost(step), OnNonFinite::Skip, &recipe).ok());
        assert_eq!(kept, [Some(3), Some(4), None, Some(6), Some(9)]);
        assert_eq!(skipped, BTreeSet::from([3, 4, 6, 9]));
        assert!(leave_out(&mut skipped, lost(10), OnNonFinite::Rollback, &recipe).is_err(), "another way");
        assert!(leave_out(&mut skipped, Fault::usage("x", "y"), OnNonFinite::Skip, &recipe).is_err(), "another error");
    }
}
