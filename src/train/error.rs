//! What can go wrong in a run.

use std::path::Path;

use super::RankError;
use crate::checkpoint::CheckpointError;
use crate::engine::EngineError;
use crate::eval::is_given_up;
use crate::generation::GenerationError;
use crate::model::ModelError;
use crate::optim::OptimError;
use crate::recipe::{Difference, RecipeError};
use crate::units::{Exit, Failure, Fault, abridged, quoted};

#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The model or the adapter can't be loaded.
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Generation(#[from] GenerationError),
    #[error(transparent)]
    Fault(#[from] Fault),
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// A checkpoint can't be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A checkpoint could not be written; those before it are intact.
    #[error(transparent)]
    NotSaved(CheckpointError),
    /// Memory ran out in a step; what was saved before is intact.
    #[error("out of memory: {reason}", reason = abridged(reason))]
    OutOfMemory {
        reason: String,
        /// A tiling that should fit, in words, if the planner knows one.
        advice: Option<String>,
    },
    /// A loss or a gradient is not finite; the optimiser is untouched.
    #[error("step {step}: {what} is not finite, in {}", listed_samples(samples))]
    NotFinite {
        /// The step that was being made.
        step: u64,
        /// The loss, or the gradient of the first parameter by name that has one.
        what: String,
        /// Samples whose loss is not finite, else all of the step, as indices in their file from 0.
        samples: Vec<u64>,
    },
    /// The loss of a step is above the recipe's bound; the optimiser is untouched.
    #[error("step {step}: the loss is {loss:.4}, above `train.max_loss` = {most}")]
    LossTooHigh {
        /// The step that was being made.
        step: u64,
        loss: f64,
        most: f64,
    },
    /// An update has made a number that is not finite; it is not saved.
    #[error("step {step}: its update made `{name}` not finite", name = quoted(name))]
    UpdateNotFinite {
        /// The step that was made.
        step: u64,
        /// The first parameter, or tensor of the optimiser, that has such a number.
        name: String,
    },
    /// Several ranks can't train together, or no longer.
    #[error(transparent)]
    Ranks(#[from] RankError),
}

impl TrainError {
    /// The step, counted from 1, that came to nothing finite, where it is such an error.
    pub(super) fn lost_step(&self) -> Option<u64> {
        match self {
            Self::NotFinite { step, .. } | Self::LossTooHigh { step, .. } | Self::UpdateNotFinite { step, .. } => Some(*step),
            _ => None,
        }
    }

    /// Whether what was being run was given up as it was asked for.
    pub(super) fn is_given_up(&self) -> bool {
        matches!(self, Self::Engine(EngineError::GivenUp))
            || matches!(self, Self::Fault(error) if is_given_up(error))
            || matches!(self, Self::Ranks(error) if error.is_given_up())
    }
}

fn listed_samples(samples: &[u64]) -> String {
    let numbers: Vec<String> = samples.iter().take(8).map(ToString::to_string).collect();
    let more = if samples.len() > 8 { format!(" and {} more", samples.len() - 8) } else { String::new() };
    format!("sample{} {}{more} (counted from 0)", if samples.len() == 1 { "" } else { "s" }, numbers.join(", "))
}

/// Keys of a recipe that differ, a line each.
pub(super) fn listed(differences: &[Difference]) -> String {
    let line = |d: &Difference| format!("\n  `{}`: was {}, is {}", d.key, d.before, d.after);
    differences.iter().map(line).collect()
}

pub(super) fn other_model(checkpoint: &Path, difference: &str) -> TrainError {
    let (path, difference) = (abridged(checkpoint.display()), abridged(difference));
    let message = format!("the checkpoint `{path}` belongs to another model or adapter: {difference}");
    Fault::data(message, "resume with the model and the settings that the run began with").into()
}

/// A data file that is not the one that the run began with.
pub(super) fn other_data(path: &Path) -> TrainError {
    let message = format!("`{}` has changed since the checkpoint was written", abridged(path.display()));
    let hint = "restore the file, or begin a new run: a resumed run goes on at the same place of the same data";
    Fault::data(message, hint).into()
}

/// A file of a run that is not as the run wrote it.
pub(super) fn changed_file(path: &Path) -> TrainError {
    Fault::data(format!("`{}` is not as the run wrote it", path.display()), RESTORE).into()
}

/// Handlers of signals that cannot be installed.
pub(super) fn no_signals(error: &std::io::Error) -> TrainError {
    let message = format!("can't watch for signals: {error}");
    Fault::new(Exit::Failed, message).with_hint("a run must be able to save when it is interrupted").into()
}

/// For a recipe that is not as it was written.
pub(super) const RESTORE: &str =
    "restore the run's `recipe.resolved.toml`; what may change in a run is changed by `kvtune resume RUN --set key=value`";

/// For a loss or a gradient that is not finite.
const LOOK: &str = "what was saved before is intact: look at these samples and at the model's weights, or begin again with a lower \
                    `optimizer.learning_rate`";

impl Failure for TrainError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::OutOfMemory { advice: Some(advice), .. } => {
                Some(format!("{advice}; or `grad.on_out_of_memory = \"retreat\"`, which finds one by trying"))
            }
            Self::OutOfMemory { reason, advice: None } => EngineError::OutOfMemory(reason.clone()).hint(),
            Self::LossTooHigh { .. } => Some(
                "what was saved before is intact: look at the data of this step, begin again with a lower `optimizer.learning_rate`, or \
                 resume with `--set train.on_non_finite=rollback`"
                    .into(),
            ),
            Self::UpdateNotFinite { .. } => Some(
                "what was saved before is intact: begin again with a lower `optimizer.learning_rate`, or resume with \
                 `--set train.on_non_finite=rollback`"
                    .into(),
            ),
            Self::NotFinite { .. } => Some(LOOK.into()),
            Self::Fault(error) => error.hint(),
            _ => self.origin()?.hint(),
        }
    }

    fn exit(&self) -> Exit {
        match self {
            Self::OutOfMemory { .. } => Exit::Memory,
            Self::NotFinite { .. } | Self::LossTooHigh { .. } | Self::UpdateNotFinite { .. } => Exit::NotFinite,
            Self::Fault(error) => error.exit(),
            // What was to be written is right, wherever that failed.
            Self::NotSaved(_) => Exit::Failed,
            _ => self.origin().map_or(Exit::Failed, Failure::exit),
        }
    }

    fn origin(&self) -> Option<&dyn Failure> {
        match self {
            Self::Recipe(e) => Some(e),
            Self::Model(e) => Some(e),
            Self::Engine(e) => Some(e),
            Self::Generation(e) => Some(e),
            Self::Optim(e) => Some(e),
            Self::Checkpoint(e) | Self::NotSaved(e) => Some(e),
            Self::Ranks(e) => Some(e),
            _ => None,
        }
    }
}
