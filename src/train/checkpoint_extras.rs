//! What checkpoints of a run have that no step changes.

use super::build;
use crate::export::PolicyTrial;
use crate::model::ModelConfig;
use crate::recipe::Recipe;
use crate::units::Fault;

/// What checkpoints have beside model and optimiser, read when the run begins: it can be saved whatever becomes of the base.
pub(super) struct CheckpointExtras {
    pub(super) model_hash: String,
    /// What a checkpoint's policy file is recorded with.
    pub(super) trial: PolicyTrial,
    /// Files that `final` has beside the adapter.
    pub(super) companions: Vec<(String, Vec<u8>)>,
}

impl CheckpointExtras {
    pub(super) fn new(recipe: &Recipe, config: &ModelConfig, model_hash: String) -> Result<Self, Fault> {
        let trial = PolicyTrial::smallest(config, &recipe.kv_cache, &recipe.grad)?;
        Ok(Self { model_hash, trial, companions: build::companions_of_end(recipe)? })
    }
}
