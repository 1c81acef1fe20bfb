//! Which micro-batches of a step a rank runs.

use tch::{Device, Kind};

use super::step::StepShare;
use super::{RunRanks, TrainError};
use crate::data::{Batch, Dataset, share};
use crate::engine::Settings;
use crate::model::{Model, ModelConfig};
use crate::plan::{Flops, StepSpec, TrainedPart};
use crate::recipe::{HeadRecipe, Recipe};

/// Deals the micro-batches of steps to ranks by what they take, the same on every rank.
#[derive(Debug)]
pub(super) struct Dealer {
    /// Of the run at its beginning: how far a rank has retreated later changes nothing.
    settings: Settings,
    trained: TrainedPart,
    on: (Kind, Device),
}

/// What this rank runs of a step.
pub(super) struct Dealt {
    batches: Vec<Batch>,
    places: Vec<usize>,
    micro_batches: usize,
    targets: usize,
}

impl Dealt {
    /// As a step takes it.
    pub(super) fn share(&self) -> StepShare<'_> {
        let Self { ref batches, ref places, micro_batches, targets } = *self;
        StepShare { batches, places: places.clone(), micro_batches, targets }
    }
}

impl Dealer {
    pub(super) fn new(recipe: &Recipe, model: &Model) -> Result<Self, TrainError> {
        Ok(Self {
            settings: Settings::new(model.config(), &recipe.kv_cache, &recipe.grad)?,
            trained: TrainedPart::of(model.config(), recipe.lora.as_ref())?,
            on: (model.kind(), model.device()),
        })
    }

    /// What this rank runs of a step's micro-batches. It reads no others: their targets are told.
    pub(super) fn deal(
        &self,
        step: &[Vec<usize>],
        data: &Dataset,
        (recipe, config): (&Recipe, &ModelConfig),
        ranks: &RunRanks,
    ) -> Result<Dealt, TrainError> {
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
        Ok(Dealt { batches, places, micro_batches: step.len(), targets })
    }

    /// The operations of a micro-batch, as the planner counts them.
    fn weight(&self, samples: &[usize], data: &Dataset, (recipe, config): (&Recipe, &ModelConfig)) -> Result<usize, TrainError> {
        let lengths: Vec<usize> = samples.iter().map(|&sample| data.lengths()[sample]).collect();
        let spec = StepSpec {
            config,
            settings: &self.settings,
            trained: &self.trained,
            optimizer: &recipe.optimizer,
            offload: recipe.train.offload,
            kind: self.on.0,
            device: self.on.1,
            threads: 1,
            ranks: 1,
            accumulates: false,
        };
        let tokens = lengths.iter().sum();
        let targets = if recipe.head == HeadRecipe::NextToken { tokens } else { lengths.len() };
        Ok(Flops::of(&spec, &self.settings.plan_unread(&lengths)?, (tokens, targets)).total() as usize)
    }
}
