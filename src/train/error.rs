//! What can go wrong in a run.

use std::path::PathBuf;

use super::rank_error::RankError;
use crate::checkpoint::CheckpointError;
use crate::data::DataError;
use crate::engine::EngineError;
use crate::eval::is_given_up;
use crate::files::FilesError;
use crate::generation::GenerationError;
use crate::model::ModelError;
use crate::optim::OptimError;
use crate::recipe::{Difference, RecipeError};
use crate::units::{Exit, Failure, Fault, abridged, quoted};

#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// Data can't be read or used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A file can't be read or written.
    #[error(transparent)]
    Files(#[from] FilesError),
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
    /// Answers at validation without samples to validate with.
    #[error("`eval.generate` is set, and no samples are held out for validation")]
    NothingToAnswer,
    /// A directory that no run wrote.
    #[error("`{path}` is not the directory of a run: it has no `recipe.resolved.toml`", path = abridged(path.display()))]
    NoRun { path: PathBuf },
    /// The checkpoint to resume from is none of the run's.
    #[error("the run `{run}` has no checkpoint `{name}`: expected {expected}", run = abridged(run.display()), name = quoted(name))]
    NoCheckpoint {
        run: PathBuf,
        /// As the user named it.
        name: String,
        expected: String,
    },
    /// The recipe's LoRA and the adapter it starts from contradict each other.
    #[error("`lora.{key}` is {recipe} in the recipe, but {adapter} in the adapter `{path}`", path = abridged(path.display()))]
    OtherAdapter {
        /// `r`, `alpha` or `target_modules`.
        key: &'static str,
        recipe: String,
        adapter: String,
        path: PathBuf,
    },
    /// An adapter was trained with other rotary embeddings than the recipe's model has.
    #[error("the adapter in `{path}` was trained with other positions: {scaling}", path = abridged(path.display()))]
    OtherPositions { path: PathBuf, scaling: String },
    /// A loss of routers is asked for, and the model has none.
    #[error("`train.router_aux_loss_coef` is set, and the model `{model}` has no experts", model = abridged(model.display()))]
    NoRouters { model: PathBuf },
    /// A loss of routers is asked for, and those of the model need none.
    #[error("`train.router_aux_loss_coef` is set, and the routers of `{model}` are balanced by a correction of their own", model = abridged(model.display()))]
    CorrectedRouters { model: PathBuf },
    /// The model was made for other classes than the recipe's.
    #[error("the model `{model}` is a classifier of {found} classes, and `[head]` asks for {}", asked_for(*asked), model = abridged(model.display()))]
    OtherClasses {
        model: PathBuf,
        found: usize,
        /// What the recipe has, if classes.
        asked: Option<usize>,
    },
    /// Nothing scores the classes of the recipe.
    #[error("`head.kind` is `seq_classification`, and the model `{model}` has no matrix that scores classes", model = abridged(model.display()))]
    NoScore { model: PathBuf },
    /// The output directory has something in it.
    #[error("the output directory `{path}` is not empty", path = abridged(path.display()))]
    OutputInTheWay { path: PathBuf },
    /// A resumed run may not change this.
    #[error("a resumed run must go on as it began, but the recipe differs:{}", listed(differences))]
    ChangedRecipe { differences: Vec<Difference> },
    /// The recipe of a run is not the one that a checkpoint was trained with.
    #[error("the checkpoint `{path}` was trained with another recipe than its run has now:{}", listed(differences), path = path.display())]
    OtherRecipe { path: PathBuf, differences: Vec<Difference> },
    /// A checkpoint is being removed by its run.
    #[error("the checkpoint in `{path}` is being removed by its run", path = path.display())]
    Gone {
        /// Its directory, or the run's.
        path: PathBuf,
    },
    /// A file of a run is not as the run wrote it.
    #[error("`{path}` is not as the run wrote it", path = path.display())]
    ChangedFile { path: PathBuf },
    /// A data file is not the one that the run began with.
    #[error("`{path}` has changed since the checkpoint was written", path = abridged(path.display()))]
    OtherData { path: PathBuf },
    /// The data are divided into training and validation in another way.
    #[error("the samples of `{path}` are not divided as `{split}` has them", path = abridged(path.display()), split = abridged(split.display()))]
    OtherSplit {
        path: PathBuf,
        /// What the run has written down.
        split: PathBuf,
    },
    /// Prompts whose replies the data do not have.
    #[error("`data.prompt = \"upstream-cot\"` asks for thoughts, and the data have none to train on")]
    NothingToTrain,
    /// Texts become other tokens than those that the run began with.
    #[error("texts of the model `{model}` become other tokens than when the run began: changed are {changed}", model = model.display())]
    OtherTexts { model: PathBuf, changed: String },
    /// The checkpoint belongs to a model with other parameters.
    #[error("the checkpoint `{path}` belongs to another model or adapter: {difference}", path = abridged(path.display()), difference = abridged(difference))]
    OtherModel { path: PathBuf, difference: String },
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
    /// A checkpoint holds a number that is not finite.
    #[error("the checkpoint `{path}` can't be gone on from: `{name}` is not finite", path = abridged(path.display()), name = quoted(name))]
    SavedNotFinite {
        path: PathBuf,
        /// The first such parameter, or tensor of the optimiser.
        name: String,
    },
    /// Several ranks can't train together, or no longer.
    #[error(transparent)]
    Ranks(#[from] RankError),
    /// The handlers of signals can't be installed.
    #[error("can't watch for signals: {0}")]
    Signals(std::io::Error),
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

fn asked_for(classes: Option<usize>) -> String {
    classes.map_or_else(|| "none".to_owned(), |count| format!("{count} classes"))
}

fn listed(differences: &[Difference]) -> String {
    let line = |d: &Difference| format!("\n  `{}`: was {}, is {}", d.key, d.before, d.after);
    differences.iter().map(line).collect()
}

/// For a recipe that is not as it was written.
const RESTORE: &str =
    "restore the run's `recipe.resolved.toml`; what may change in a run is changed by `kvtune resume RUN --set key=value`";

/// For a loss or a gradient that is not finite.
const LOOK: &str = "what was saved before is intact: look at these samples and at the model's weights, or begin again with a lower \
                    `optimizer.learning_rate`";

impl Failure for TrainError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::OtherAdapter { .. } => Some("make `[lora]` agree with the adapter, or leave `model.adapter` out".into()),
            Self::OtherPositions { .. } => {
                Some("make `model.rope_scaling` in the recipe the same, and take the model it was trained on".into())
            }
            Self::CorrectedRouters { .. } => {
                Some("leave the key out: this loss is of routers with a softmax over all experts".into())
            }
            Self::NothingToAnswer => {
                Some("set `data.validation` or `data.validation_fraction`, or leave `eval.generate` out".into())
            }
            Self::OtherClasses { .. } => Some("let `head.kind` be `seq_classification`, with as many classes as the model has".into()),
            Self::NoScore { .. } => Some(
                "train one with an adapter (`kvtune finetune-lora`), or begin with a model that was saved as a classifier of sequences"
                    .into(),
            ),
            Self::NoRouters { .. } => Some("leave the key out: it balances the experts of such models as Mixtral".into()),
            Self::NoRun { .. } => Some(
                "name a directory that `kvtune finetune-lora` or `finetune-full` has written; `evaluate` takes `--recipe` too"
                    .into(),
            ),
            Self::NoCheckpoint { .. } => Some("name one of these, or leave `--from` out for the newest".into()),
            Self::OutputInTheWay { path } if path.join(super::RESOLVED_RECIPE).exists() => {
                Some(format!("choose another `--out`, or go on with `kvtune resume {}`", path.display()))
            }
            Self::OutputInTheWay { .. } => Some("choose another `--out`, or empty the directory".into()),
            Self::ChangedRecipe { .. } => {
                Some("only the length of the run, logging, saving, `grad.*` and where model and data lie may change on resume".into())
            }
            Self::Gone { .. } => Some("name another checkpoint of the run, or the run for its newest".into()),
            Self::OtherRecipe { .. } | Self::ChangedFile { .. } => Some(RESTORE.into()),
            Self::OtherData { .. } => {
                Some("restore the file, or begin a new run: a resumed run goes on at the same place of the same data".into())
            }
            Self::NothingToTrain => Some("train with `data.prompt = \"upstream\"`, and evaluate with this one".into()),
            Self::OtherSplit { .. } => {
                Some("begin a new run: with this version, what the run has not seen so far would be other samples".into())
            }
            Self::OtherModel { .. } | Self::OtherTexts { .. } => Some("resume with the model and the settings that the run began with".into()),
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
            Self::SavedNotFinite { .. } => Some("go on from an earlier checkpoint: `kvtune resume RUN --from step-…`".into()),
            Self::Signals(_) => Some("a run must be able to save when it is interrupted".into()),
            Self::NotFinite { .. } => Some(LOOK.into()),
            _ => self.origin()?.hint(),
        }
    }

    fn exit(&self) -> Exit {
        match self {
            Self::ChangedRecipe { .. }
            | Self::OtherAdapter { .. }
            | Self::OtherPositions { .. }
            | Self::NoRouters { .. }
            | Self::CorrectedRouters { .. }
            | Self::NothingToAnswer
            | Self::OtherClasses { .. }
            | Self::NoScore { .. }
            | Self::OutputInTheWay { .. }
            | Self::NoRun { .. }
            | Self::NothingToTrain
            | Self::NoCheckpoint { .. } => Exit::Usage,
            Self::OtherRecipe { .. }
            | Self::ChangedFile { .. }
            | Self::OtherModel { .. }
            | Self::OtherData { .. }
            | Self::OtherTexts { .. }
            | Self::OtherSplit { .. }
            | Self::SavedNotFinite { .. } => Exit::Data,
            Self::OutOfMemory { .. } => Exit::Memory,
            Self::NotFinite { .. } | Self::LossTooHigh { .. } | Self::UpdateNotFinite { .. } => Exit::NotFinite,
            // What was to be written is right, wherever that failed.
            Self::NotSaved(_) => Exit::Failed,
            _ => self.origin().map_or(Exit::Failed, Failure::exit),
        }
    }

    fn origin(&self) -> Option<&dyn Failure> {
        match self {
            Self::Recipe(e) => Some(e),
            Self::Data(e) => Some(e),
            Self::Files(e) => Some(e),
            Self::Model(e) => Some(e),
            Self::Engine(e) => Some(e),
            Self::Generation(e) => Some(e),
            Self::Fault(e) => Some(e.meaning()),
            Self::Optim(e) => Some(e),
            Self::Checkpoint(e) | Self::NotSaved(e) => Some(e),
            Self::Ranks(e) => Some(e),
            _ => None,
        }
    }
}
