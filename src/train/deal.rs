//! Which micro-batches of a step a rank runs.

use super::TrainError;
use super::step::StepShare;
use crate::data::{Batch, Dataset, share};
use crate::dist::World;

/// Where a rank's micro-batches stand in a step.
pub(super) struct Dealt {
    places: Vec<usize>,
    micro_batches: usize,
    targets: usize,
}

impl Dealt {
    /// As the share whose batches these are.
    pub(super) fn of<'a>(&self, batches: &'a [Batch]) -> StepShare<'a> {
        let Self { ref places, micro_batches, targets } = *self;
        StepShare { batches, places: places.clone(), micro_batches, targets }
    }
}

/// What this rank runs of a step's micro-batches. Those of others are read, too: their targets count.
pub(super) fn deal(step: &[Vec<usize>], data: &Dataset, world: &World) -> Result<(Vec<Batch>, Dealt), TrainError> {
    let tokens = |samples: &Vec<usize>| samples.iter().map(|&sample| data.lengths()[sample]).sum();
    let places = share(&step.iter().map(tokens).collect::<Vec<usize>>(), world.size()).swap_remove(world.rank());
    let (mut batches, mut targets) = (Vec::new(), 0);
    for (place, samples) in step.iter().enumerate() {
        let batch = data.batch(samples)?;
        targets += batch.num_targets();
        if places.contains(&place) {
            batches.push(batch);
        }
    }
    Ok((batches, Dealt { places, micro_batches: step.len(), targets }))
}
