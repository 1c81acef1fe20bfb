//! Which micro-batches of a step a rank runs.

use tch::Device;

use super::RunRanks;
use crate::data::{Batch, Dataset, share};
use crate::engine::Settings;
use crate::model::ModelConfig;
use crate::plan::{Flops, StepSpec, TrainedPart};
use crate::recipe::{HeadRecipe, LossMean, Recipe};
use crate::units::Fault;

/// The micro-batches of a step that one rank runs.
#[derive(Clone, Debug)]
pub struct MicroBatchAssignment {
    pub batches: Vec<Batch>,
    /// The index of each among those of the step.
    pub indices: Vec<usize>,
    /// Micro-batches of the step, of whichever rank.
    pub micro_batches: usize,
    pub targets: usize,
    /// How many losses that of the step is the mean of.
    pub losses: usize,
}

/// Assigns the micro-batches of steps to ranks by what they take, the same on every rank.
#[derive(Debug)]
pub(super) struct MicroBatchAssigner {
    /// How the run is tiled at its beginning: smaller cells after a lack of memory change no assignment.
    settings: Settings,
    trained: TrainedPart,
}

impl MicroBatchAssigner {
    pub(super) fn new(recipe: &Recipe, config: &ModelConfig) -> Result<Self, Fault> {
        Ok(Self {
            settings: Settings::new(config, &recipe.kv_cache, &recipe.grad)?,
            trained: TrainedPart::of(config, recipe.lora.as_ref())?,
        })
    }

    /// What this rank runs of a step's micro-batches. It reads no others: their ranks tell how many targets these have.
    pub(super) fn assign(
        &self,
        step: &[Vec<usize>],
        data: &Dataset,
        recipe: &Recipe,
        config: &ModelConfig,
        ranks: &RunRanks,
    ) -> Result<MicroBatchAssignment, Fault> {
        let world = &ranks.world;
        let read = || {
            let weigh = |samples: &Vec<usize>| self.weight(samples, data, recipe, config);
            // Alone there is nothing to weigh.
            let weights = if ranks.are_several() { step.iter().map(weigh).collect() } else { Ok(vec![0; step.len()]) };
            let indices = share(&weights?, world.size()).swap_remove(world.rank());
            let batches = indices.iter().map(|&index| data.batch(&step[index])).collect::<Result<Vec<_>, _>>()?;
            Ok((indices, batches))
        };
        let (mut indices, mut batches) = (Vec::new(), Vec::new());
        let made = read().map(|read| {
            (indices, batches) = read;
            let count = |mean: LossMean| batches.iter().map(|batch| batch.num_losses(mean)).sum::<usize>();
            [LossMean::Tokens, recipe.train.loss_mean].map(count)
        });
        let counts = ranks.world.agree("reading a step's samples", made)?;
        let [targets, losses] = [0, 1].map(|of| counts.iter().map(|counts| counts[of]).sum());
        Ok(MicroBatchAssignment { batches, indices, micro_batches: step.len(), targets, losses })
    }

    /// The operations of a micro-batch, as the planner counts them.
    fn weight(&self, samples: &[usize], data: &Dataset, recipe: &Recipe, config: &ModelConfig) -> Result<usize, Fault> {
        let lengths: Vec<usize> = samples.iter().map(|&sample| data.lengths()[sample]).collect();
        // How much is computed does not depend on where.
        let spec = StepSpec::of(recipe, config, &self.settings, &self.trained, Device::Cpu);
        let tokens = lengths.iter().sum();
        let targets = if recipe.head == HeadRecipe::NextToken { tokens } else { lengths.len() };
        Ok(Flops::of(&spec, &self.settings.plan_unread(&lengths)?, tokens, targets).total() as usize)
    }
}
