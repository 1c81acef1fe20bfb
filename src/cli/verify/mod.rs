//! `kvtune verify`: the proof on the user's own model and data.

mod conformance;
mod dump;
mod every_tiling;
mod proof;

use std::path::PathBuf;

use clap::{ArgGroup, Args};
use tch::Device;

use super::recipe_file::RecipeFile;
use super::values::at_least_one;
use crate::cache::ReplayLog;
use crate::data::Tokenizer;
use crate::engine::{Engine, NoObserver};
use crate::recipe::{Dtype, Recipe, ValidationSource};
use crate::report::console;
use crate::train::{self, Teacher};
use crate::units::Fault;
use crate::verify::{Proofs, fits_in_f64};
use proof::proof_model;

/// Prove the gradients on your model and data against plain autograd.
#[derive(Debug, Args)]
#[command(mut_group("RecipePath", |recipe| recipe.required(false)))]
#[command(group = ArgGroup::new("subject").args(["place", "recipe", "conformance"]).required(true))]
pub(super) struct Verify {
    #[command(flatten)]
    recipe: RecipeFile,
    /// Instead test that the cache evicts what `kv_policy.json` of this checkpoint or export records.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["set", "full", "every_tiling", "samples", "dump", "replay_log"])]
    conformance: Option<PathBuf>,
    /// Base model of the adapter. Default: the one that the adapter names.
    // A recipe, which excludes `--conformance`, would waive that this requires it.
    #[arg(long, value_name = "MODEL", requires = "conformance", conflicts_with_all = ["place", "recipe"])]
    base: Option<PathBuf>,
    /// Prove other tilings than the recipe's too: shapes of cells, stores, caches that wait on the host.
    #[arg(long)]
    every_tiling: bool,
    /// Samples to prove, from the start of the training file, in one batch. Default: `train.micro_batch_size`; with `--dump`,
    /// all samples of the file.
    #[arg(long, value_name = "K", value_parser = at_least_one())]
    samples: Option<usize>,
    /// Write loss, gradients, logits, evictions and the replay log to this directory.
    #[arg(long, value_name = "DIR")]
    dump: Option<PathBuf>,
    /// Evict what this replay log of an earlier dump says, instead of asking the policy.
    #[arg(long, value_name = "FILE")]
    replay_log: Option<PathBuf>,
}

impl Verify {
    pub(super) fn run(&self, device: Device) -> Result<(), Fault> {
        if let Some(dir) = &self.conformance {
            return conformance::check(dir, self.base.as_deref(), device);
        }
        let mut recipe = self.recipe.load(device)?;
        // The proof takes the sequences of the file in their order.
        recipe.data.change(&|data| data.validation = ValidationSource::Fraction(0.0));
        // Before the model is there.
        let machine = (!recipe.grad.open.is_empty()).then(|| train::machine_of_trial(&recipe, device));
        let mut model = proof_model(&recipe, recipe.model.dtype, device)?;
        let tokenizer = Tokenizer::load_if_present(&recipe.model.path)?;
        let (config, log) = (model.config().clone(), self.replay_log.as_deref());
        let engine_of = |recipe: &Recipe| -> Result<Engine, Fault> {
            let engine = train::engine(recipe, &config, tokenizer.as_ref(), None)?;
            Ok(if let Some(path) = log { engine.following(ReplayLog::load(path)?) } else { engine })
        };
        train::check_data(&recipe, &config)?;
        // What is wrong with the recipe is said before the data are read.
        engine_of(&Recipe { grad: recipe.grad.closed(), ..recipe.clone() })?;
        let data = train::open_data(&recipe, &config, tokenizer.as_ref())?;
        console::note(&data.to_string());
        let mut batch = proof::batch(&data.train, self.samples, self.dump.is_some(), recipe.train.batch_size.sequences())?;
        if let Some(machine) = machine {
            recipe = train::resolved(recipe, &config, &batch, machine)?.0;
        }
        if let Some(teacher) = Teacher::new(&recipe, &config, None)? {
            teacher.soften(&mut model, &mut batch, &NoObserver)?;
        }
        let engine = engine_of(&recipe)?;
        let context = proof::context(&recipe, &batch);
        if let Some(dir) = &self.dump {
            dump::write(dir, &engine, &model, &batch, context)?;
            console::note(&format!("wrote the dump to {}", dir.display()));
        }
        let dtype = if fits_in_f64(&model, &batch) { Dtype::F64 } else { Dtype::F32 };
        let model = if recipe.model.dtype == dtype { model } else { proof_model(&recipe, dtype, device)? };
        let mut proofs = Proofs::new(&model, &batch, context);
        if self.every_tiling {
            return every_tiling::prove(&recipe, engine_of, &mut proofs);
        }
        let found = proofs.prove(&engine)?;
        proof::tell(&proofs, &found, &engine.settings().inexact_stores(model.first_trained_layer()))
    }
}
