//! Which micro-batches of a step a rank runs.

use tch::Device;

use super::step::StepShare;
use super::{RunRanks, TrainError};
use crate::data::{Batch, Dataset, share};
use crate::engine::Settings;
use crate::model::ModelConfig;
use crate::plan::{Flops, StepSpec, TrainedPart};
use crate::recipe::{HeadRecipe, Recipe};

/// Deals the micro-batches of steps to ranks by what they take, the same on every rank.
#[derive(Debug)]
pub(super) struct Dealer {
    /// Of the run at its beginning: how far a rank has retreated later changes nothing.
    settings: Settings,
    trained: TrainedPart,
}

impl Dealer {
    pub(super) fn new(recipe: &Recipe, config: &ModelConfig) -> Result<Self, TrainError> {
        Ok(Self {
            settings: Settings::new(config, &recipe.kv_cache, &recipe.grad)?,
            trained: TrainedPart::of(config, recipe.lora.as_ref())?,
        })
    }

    /// What this rank runs of a step's micro-batches. It reads no others: their targets are told.
    pub(super) fn deal(
        &self,
        step: &[Vec<usize>],
        data: &Dataset,
        (recipe, config): (&Recipe, &ModelConfig),
        ranks: &RunRanks,
    ) -> Result<StepShare, TrainError> {
        let world = ranks.world();
        let read = || {
            let weigh = |samples: &Vec<usize>| self.weight(samples, data, (recipe, config));
            // Alone there is nothing to weigh.
            let weights = if ranks.are_several() { step.iter().map(weigh).collect() } else { Ok(vec![0; step.len()]) };
            let places = share(&weights?, world.size()).swap_remove(world.rank());
            let batches = places.iter().map(|&place| data.batch(&step[place])).collect::<Result<Vec<_>, _>>()?;
            Ok((places, batches))
        };
        let (mut places, mut batches) = (Vec::new(), Vec::new());
        let made = read().map(|read| {
            (places, batches) = read;
            batches.iter().map(Batch::num_targets).sum::<usize>()
        });
        let targets = ranks.exchange("reading a step's samples", made)?.into_iter().sum();
        Ok(StepShare { batches, places, micro_batches: step.len(), targets })
    }

    /// The operations of a micro-batch, as the planner counts them.
    fn weight(&self, samples: &[usize], data: &Dataset, (recipe, config): (&Recipe, &ModelConfig)) -> Result<usize, TrainError> {
        let lengths: Vec<usize> = samples.iter().map(|&sample| data.lengths()[sample]).collect();
        // How much is computed does not depend on where.
        let spec = StepSpec::of(recipe, config, &self.settings, &self.trained, Device::Cpu);
        let tokens = lengths.iter().sum();
        let targets = if recipe.head == HeadRecipe::NextToken { tokens } else { lengths.len() };
        Ok(Flops::of(&spec, &self.settings.plan_unread(&lengths)?, (tokens, targets)).total() as usize)
    }
}
