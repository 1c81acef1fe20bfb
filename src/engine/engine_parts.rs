//! The engine, as its phases take it: its stores, what goes into a step beside the batch, and what comes out.

use std::collections::BTreeMap;
use std::path::PathBuf;

use tch::Tensor;

use super::Settings;
use crate::cache::ReplayLog;
use crate::head::{Head, SequenceLoss};
use crate::recipe::{LossMean, StoreForm, StorePlace, StoreRecipe};
use crate::store::Store;
use crate::units::StepKey;

/// Runs batches through one model's shape, cache and head.
pub struct Engine {
    pub(super) settings: Settings,
    pub(super) head: Head,
    pub(super) stores: Stores,
    /// What the forward phase follows instead of choosing.
    pub(super) log: Option<ReplayLog>,
}

/// One store for layer checkpoints, one for the undo log and one for attention's outputs. They live as long as their engine, so that a step
/// uses the room of the one before.
#[derive(Debug)]
pub struct Stores {
    /// Hidden states at the borders of layer bands.
    pub layer_checkpoints: Store,
    /// Keys and values that were overwritten.
    pub undo_log: Store,
    /// Attention's outputs, where they are kept. On a CPU they stay where they are instead.
    pub attention_outputs: Store,
}

impl Stores {
    pub(super) fn new(settings: &Settings) -> Self {
        let grad = settings.grad();
        Self {
            layer_checkpoints: store(grad.layer_checkpoints, grad.scratch_dir.clone()),
            undo_log: store(grad.undo_log, grad.scratch_dir.clone()),
            attention_outputs: Store::in_memory(StoreForm::Plain),
        }
    }
}

fn store(recipe: StoreRecipe, dir: Option<PathBuf>) -> Store {
    let form = recipe.form;
    match recipe.place {
        StorePlace::Memory => Store::in_memory(form),
        StorePlace::File => Store::in_file(form, dir),
    }
}

#[derive(Clone, Copy, Debug)]
pub struct MicroBatchContext {
    /// The gradient is that of `Σ losses · weight`: one over the targets of the global batch, or over its sequences.
    pub weight: f64,
    /// Whether `Σ losses` is over targets, or over the means of sequences.
    pub loss_mean: LossMean,
    /// The factor of the routers' load-balance loss of this micro-batch, which is added; 0 adds nothing.
    pub router_weight: f64,
    /// Seed and step of the dropout masks; `None` outside training.
    pub dropout: Option<StepKey>,
    /// What the sizes of chunks are drawn from where the recipe randomises them; `None` outside training.
    pub chunk_sizes: Option<StepKey>,
}

#[derive(Debug)]
pub struct MicroBatchGradients {
    pub losses: Vec<SequenceLoss>,
    /// The routers' load-balance loss, where it has a weight and the model has experts.
    pub router_loss: Option<f64>,
    /// Gradients by the names of the model's parameters, in their dtype, or in f32 for bf16; zero where one had no influence. On the
    /// host where the weights wait there.
    pub gradients: BTreeMap<String, Tensor>,
    /// The choices that were replayed.
    pub log: ReplayLog,
}
