//! A run and its checkpoints: what is saved of it, when, and what of it is taken over.

use std::path::{Path, PathBuf};

use tch::Device;

use super::rank_facts::{check_same, of_trained};
use super::step::first_not_finite;
use super::{Trainer, build, not_saved, other_model};
use crate::checkpoint::{self, CARD, FINAL, OptimizerTensors, SaveKind, Snapshot, TrainState};
use crate::export::{KV_POLICY, PolicyFile, Trained, card_of_run};
use crate::files;
use crate::model::has_fingerprint;
use crate::recipe::{Difference, TrainedWeights};
use crate::report::console;
use crate::report::metrics::{self, METRICS};
use crate::units::{Fault, abridged, quoted};

impl Trainer {
    /// Takes a checkpoint over, but for the optimiser's state; returns why it was written.
    pub(super) fn load(&mut self, dir: &Path) -> Result<SaveKind, Fault> {
        let (parameters, state) = checkpoint::load(dir)?;
        self.check_settings(&state, dir)?;
        self.check_data(&state)?;
        if !has_fingerprint(&self.recipe.model.path, &state.model_hash)? {
            let difference = format!("`{}` is not as it was when the run began", self.recipe.model.path.display());
            return Err(other_model(dir, &difference));
        }
        let trained = self.model.take_saved(parameters);
        build::take_parameters(&self.model, &trained, dir)?;
        build::load_gates(&mut self.model, dir)?;
        let own = &mut self.state;
        (own.step, own.total_tokens, own.best) = (state.step, state.total_tokens, state.best);
        own.skipped_steps.extend(state.skipped_steps);
        own.owes_validation = state.owes_validation;
        own.unchecked_metrics = state.unchecked_metrics;
        // What the optimiser holds now is about to be replaced, and may be why an earlier checkpoint is loaded.
        let parameters = self.model.parameters();
        if let Some(name) = first_not_finite(parameters.iter().map(|(name, tensor)| (&name[..], tensor))) {
            return Err(holds_not_finite(dir, name));
        }
        let threads = tch::get_num_threads();
        if let Some(before) = state.threads.filter(|&before| before != threads && self.model.device() == Device::Cpu) {
            console::note(&format!(
                "{before} threads computed until here, {threads} do now: sums have another order, so that their last bits differ"
            ));
        }
        let has_own = matches!(state.kind, SaveKind::Regular | SaveKind::Intermediate);
        self.saved.set(has_own.then_some(state.step));
        Ok(state.kind)
    }

    /// Takes over what the optimiser held at a checkpoint that was loaded.
    pub(super) fn load_optimizer(&mut self, dir: &Path) -> Result<(), Fault> {
        self.optimizer.load_state(&self.shard.own(checkpoint::load_optimizer(dir)?))?;
        self.not_finite()?.map_or(Ok(()), |name| Err(holds_not_finite(dir, &name)))
    }

    /// A checkpoint belongs to the recipe that it was trained with.
    fn check_settings(&self, state: &TrainState, dir: &Path) -> Result<(), Fault> {
        let Some(mut saved) = state.settings.clone() else { return Ok(()) };
        saved.insert("train.seed".to_owned(), state.seed.to_string());
        let differences = self.recipe.changes_since(&saved, dir)?;
        if differences.is_empty() {
            return Ok(());
        }
        let (place, listed) = (dir.display(), listed_differences(&differences));
        let message = format!("the checkpoint `{place}` was trained with another recipe than its run has now:{listed}");
        Err(Fault::data(message, RESTORE))
    }

    /// The position in the data is one in these files, and the best validation one of these samples.
    fn check_data(&self, state: &TrainState) -> Result<(), Fault> {
        if state.data_hash != self.state.data_hash {
            return Err(other_data(self.data.train.path()));
        }
        match &self.data.validation {
            Some(data) if state.validation_hash != self.state.validation_hash => Err(other_data(data.path())),
            _ => Ok(()),
        }
    }

    /// Why the step just made is saved, if it is.
    pub(super) fn save_due(&self) -> Option<SaveKind> {
        let saving = &self.recipe.checkpoint;
        if self.state.step.is_multiple_of(saving.save_interval) {
            return Some(SaveKind::Regular);
        }
        saving.intermediate_save_interval.filter(|i| self.state.step.is_multiple_of(*i)).map(|_| SaveKind::Intermediate)
    }

    /// The first rank writes a checkpoint, for which the others wait.
    pub(super) fn save(&self, kind: SaveKind) -> Result<Option<PathBuf>, Fault> {
        self.require_finite()?;
        // A rank that computes otherwise, on another kind of machine say, is told before what it has made is kept.
        if self.ranks.are_several() {
            check_same(&self.ranks.world, "about to save", of_trained(&self.model)?)?;
        }
        let dir = self.shard.write(&self.ranks, self.optimizer.state(), |state| self.write(kind, state))?;
        if matches!(kind, SaveKind::Regular | SaveKind::Intermediate) {
            self.saved.set(Some(self.state.step));
        }
        Ok(dir)
    }

    fn write(&self, kind: SaveKind, optimizer: &dyn OptimizerTensors) -> Result<PathBuf, Fault> {
        let state = TrainState { kind, ..self.state.clone() };
        let base_model = self.recipe.model.path.display().to_string();
        let policy = PolicyFile::record(&self.recipe, &self.model, &self.state.model_hash, &self.trial)?;
        let mut beside = vec![(KV_POLICY.to_owned(), files::to_json(&policy))];
        if kind == SaveKind::Final {
            beside.extend(self.companions.iter().cloned());
            beside.push((CARD.to_owned(), self.card(&state)?.into_bytes()));
        }
        let snapshot = Snapshot { model: &self.model, base_model: &base_model, optimizer, beside: &beside, state: &state };
        let keep = self.recipe.checkpoint.intermediate_save_keep;
        checkpoint::save(&self.dir, &snapshot, keep).map_err(not_saved)
    }

    fn card(&self, state: &TrainState) -> Result<String, Fault> {
        let trained = Trained {
            checkpoint: &self.dir.join(FINAL),
            holds: if self.recipe.lora.is_some() { TrainedWeights::Adapter } else { TrainedWeights::All },
            base: None,
            recipe: Some(&self.recipe),
            state: Some(state.clone()),
            metrics: metrics::read(&self.dir.join(METRICS), self.state.step)?,
            results: Vec::new(),
            chat_template: None,
        };
        Ok(card_of_run(&trained, &self.recipe, &self.state.model_hash))
    }
}

/// The newest whole checkpoint of a run. What is newer and not whole is told, and set aside where it is damaged.
pub(super) fn newest(run: &Path) -> Result<PathBuf, Fault> {
    let found = checkpoint::newest(run)?;
    let places = checkpoint::set_aside(run, &found)?;
    for (dir, why) in &found.skipped {
        let place = places.iter().find(|(from, _)| from == dir).map(|(_, place)| format!("; it is now `{}`", place.display()));
        console::warning(&format!("skipped `{}`: {why}{}", dir.display(), place.unwrap_or_default()));
    }
    Ok(found.dir)
}

pub(super) fn listed_differences(differences: &[Difference]) -> String {
    let line = |d: &Difference| format!("\n  `{}`: was {}, is {}", d.key, d.before, d.after);
    differences.iter().map(line).collect()
}

fn holds_not_finite(dir: &Path, name: &str) -> Fault {
    let message = format!("cannot resume from checkpoint `{}`: `{}` is not finite", abridged(dir.display()), quoted(name));
    Fault::data(message, "go on from an earlier checkpoint: `kvtune resume RUN --from step-…`")
}

/// A data file that is not the one that the run began with.
pub(super) fn other_data(path: &Path) -> Fault {
    let message = format!("`{}` has changed since the checkpoint was written", abridged(path.display()));
    let hint = "restore the file, or begin a new run: a resumed run goes on at the same place of the same data";
    Fault::data(message, hint)
}

/// For a recipe that is not as it was written.
pub(super) const RESTORE: &str =
    "restore the run's `recipe.resolved.toml`; what may change in a run is changed by `kvtune resume RUN --set key=value`";
