//! The engine, as its phases take it, and what waits for the backward phase.

use std::path::PathBuf;

use super::Settings;
use crate::cache::ReplayLog;
use crate::head::Head;
use crate::recipe::{StoreForm, StorePlace, StoreRecipe};
use crate::store::Store;

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
    pub undo_log: Store,
    /// Attention's outputs, where they are kept. On a CPU they stay where they are instead.
    pub attention_outputs: Store,
}

impl Stores {
    pub(super) fn new(settings: &Settings) -> Self {
        let grad = settings.grad();
        Self {
            layer_checkpoints: store(grad.layer_checkpoints, grad.scratch_dir.clone(), "layer-checkpoints"),
            undo_log: store(grad.undo_log, grad.scratch_dir.clone(), "undo-log"),
            attention_outputs: Store::in_memory(StoreForm::Plain),
        }
    }
}

fn store(recipe: StoreRecipe, dir: Option<PathBuf>, purpose: &'static str) -> Store {
    let form = recipe.form;
    match recipe.place {
        StorePlace::Memory => Store::in_memory(form),
        StorePlace::File => Store::in_file(form, dir, purpose),
    }
}
