//! The union of all errors, with hints and exit codes.

use crate::bench::BenchError;
use crate::cache::CacheError;
use crate::checkpoint::CheckpointError;
use crate::data::DataError;
use crate::engine::EngineError;
use crate::eval::EvalError;
use crate::files::FilesError;
use crate::model::ModelError;
use crate::native::cuda::GraphError;
use crate::plan::PlanError;
use crate::recipe::RecipeError;
use crate::report::ReportError;
use crate::store::StoreError;
use crate::train::TrainError;
use crate::units::Hint;
use crate::verify::VerifyError;

/// Any error of kvtune.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The recipe is wrong.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// Data can't be read or used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A file can't be read or written.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// A tensor can't be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The model can't be loaded or made.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A replay log can't be read or written.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A step failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A checkpoint can't be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Training failed.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// An evaluation failed.
    #[error(transparent)]
    Eval(#[from] EvalError),
    /// A proof could not be made.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// A bench failed.
    #[error(transparent)]
    Bench(#[from] BenchError),
    /// What a person reads could not be written.
    #[error(transparent)]
    Report(#[from] ReportError),
    /// The proof found a difference.
    #[error("{}the gradients differ: the worst relative error is {worst:.2e}, the tolerance {tolerance:.0e}", with(.keys))]
    Disproved {
        /// The keys in which the tiling differs from the recipe's own; empty for that.
        keys: String,
        /// Largest relative error.
        worst: f64,
        /// What is allowed.
        tolerance: f64,
    },
    /// The gradient through stores that round points elsewhere than the exact one.
    #[error("{}the gradient has the cosine {cosine:.6} with the exact one, expected at least {smallest}", with(.keys))]
    Imprecise {
        /// The keys and what they say.
        keys: String,
        /// Of the whole gradient.
        cosine: f64,
        /// What is asked.
        smallest: f64,
    },
    /// The policies' choices depend on the tiling.
    #[error("{}other entries are evicted than in the recipe's own tiling", with(.keys))]
    OtherChoices {
        /// The keys in which the tiling differs from the recipe's own.
        keys: String,
    },
    /// Something that is promised here does not work.
    #[error("promised here, and not working: {}", quoted(.checks))]
    DoctorFailed {
        /// What was looked at, by its names.
        checks: Vec<String>,
    },
    /// A panic that nothing expected.
    #[error("kvtune has a defect: {message}\n  --> {place}")]
    Defect {
        /// What the panic said.
        message: String,
        /// Where it happened, and how it came to it if `RUST_BACKTRACE` is set.
        place: String,
    },
    /// The arguments contradict each other, or name what is not there.
    #[error("{message}")]
    Usage {
        /// What is wrong.
        message: String,
        /// What to do.
        hint: String,
    },
}

/// `with KEYS `, if there are any.
fn with(keys: &str) -> String {
    if keys.is_empty() { String::new() } else { format!("with {keys} ") }
}

/// `a`, `b`.
fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

const FAILED: u8 = 1;
const USAGE: u8 = 2;
const DATA: u8 = 3;
const MEMORY: u8 = 4;
const NOT_FINITE: u8 = 5;

impl Error {
    /// The exit code of the process: 1 failed, 2 usage or recipe, 3 data or weights, 4 out of memory, 5 loss not finite.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Recipe(_) | Self::Usage { .. } | Self::Bench(BenchError::TooLong { .. }) => USAGE,
            Self::Data(e) => of_data(e),
            Self::Model(e) => of_model(e),
            Self::Bench(BenchError::NoWeights { .. }) => DATA,
            Self::Store(e) => of_store(e),
            Self::Files(e) => of_files(e),
            Self::Cache(e) => of_cache(e),
            Self::Engine(e) | Self::Verify(VerifyError::Engine(e)) => of_engine(e),
            Self::Train(e) | Self::Bench(BenchError::Train(e)) => of_train(e),
            Self::Eval(e) => of_eval(e),
            Self::Checkpoint(e) => of_checkpoint(e),
            Self::Verify(VerifyError::NotFinite { .. }) => NOT_FINITE,
            Self::Report(_)
            | Self::Verify(_)
            | Self::Disproved { .. }
            | Self::Imprecise { .. }
            | Self::OtherChoices { .. }
            | Self::DoctorFailed { .. }
            | Self::Defect { .. } => FAILED,
        }
    }
}

/// What lies on disk is wrong (3), or writing it failed (1).
fn of_files(error: &FilesError) -> u8 {
    match error {
        FilesError::Symlink { .. } => USAGE,
        e if e.is_about_content() => DATA,
        _ => FAILED,
    }
}

fn of_store(error: &StoreError) -> u8 {
    match error {
        StoreError::Files(e) => of_files(e),
        StoreError::NoScratchDir => USAGE,
        _ => DATA,
    }
}

fn of_data(error: &DataError) -> u8 {
    match error {
        DataError::Files(e) => of_files(e),
        DataError::Options { .. } => USAGE,
        DataError::Write { .. } => FAILED,
        _ => DATA,
    }
}

fn of_model(error: &ModelError) -> u8 {
    match error {
        ModelError::Files(e) => of_files(e),
        ModelError::Store(e) => of_store(e),
        ModelError::UnknownTarget { .. }
        | ModelError::Lora { .. }
        | ModelError::TrainedDtype { .. }
        | ModelError::NotEmpty { .. } => USAGE,
        _ => DATA,
    }
}

fn of_cache(error: &CacheError) -> u8 {
    match error {
        CacheError::Files(e) => of_files(e),
        CacheError::Store(e) => of_store(e),
        CacheError::NotALog { .. } | CacheError::OtherLog { .. } => DATA,
        CacheError::OutOfOrder { .. } | CacheError::LogMismatch { .. } => FAILED,
        _ => USAGE,
    }
}

fn of_engine(error: &EngineError) -> u8 {
    match error {
        EngineError::OutOfMemory(_) => MEMORY,
        EngineError::Cache(e) => of_cache(e),
        EngineError::Store(e) => of_store(e),
        EngineError::Attend(e) => match e.cause() {
            Some(cause) if matches!(cause.downcast_ref(), Some(GraphError::Lacking(_))) => USAGE,
            cause => cause.and_then(|cause| cause.downcast_ref()).map_or(FAILED, of_cache),
        },
        EngineError::Open { .. } | EngineError::LongestChunk { .. } => USAGE,
        EngineError::Head(crate::head::HeadError::WrongTargets { .. }) | EngineError::EmptySequence | EngineError::NoTargets => {
            DATA
        }
        _ => FAILED,
    }
}

fn of_eval(error: &EvalError) -> u8 {
    match error {
        EvalError::Data(e) => of_data(e),
        EvalError::Empty => DATA,
        EvalError::Engine(e) => of_engine(e),
        EvalError::NotFinite { .. } => NOT_FINITE,
    }
}

fn of_checkpoint(error: &CheckpointError) -> u8 {
    match error {
        CheckpointError::Files(e) => of_files(e),
        CheckpointError::Store(e) => of_store(e),
        CheckpointError::Model(e) => of_model(e),
        _ => DATA,
    }
}

fn of_train(error: &TrainError) -> u8 {
    match error {
        TrainError::Recipe(_)
        | TrainError::ChangedRecipe { .. }
        | TrainError::OtherAdapter { .. }
        | TrainError::OutputInTheWay { .. }
        | TrainError::NoRun { .. }
        | TrainError::NoCheckpoint { .. } => USAGE,
        TrainError::Data(e) => of_data(e),
        TrainError::Model(e) | TrainError::Plan(PlanError::Model(e)) => of_model(e),
        TrainError::Files(e) => of_files(e),
        TrainError::Optim(_) | TrainError::OtherModel { .. } | TrainError::OtherData { .. } => DATA,
        TrainError::Engine(e) | TrainError::Plan(PlanError::Engine(e)) => of_engine(e),
        TrainError::Plan(PlanError::DoesNotFit { .. }) | TrainError::OutOfMemory { .. } => MEMORY,
        TrainError::Eval(e) => of_eval(e),
        TrainError::Checkpoint(e) => of_checkpoint(e),
        TrainError::NotFinite { .. } => NOT_FINITE,
        _ => FAILED,
    }
}

impl Hint for Error {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Recipe(e) => e.hint(),
            Self::Data(e) => e.hint(),
            Self::Files(e) => e.hint(),
            Self::Store(e) => e.hint(),
            Self::Model(e) => e.hint(),
            Self::Cache(e) => e.hint(),
            Self::Engine(e) => e.hint(),
            Self::Checkpoint(e) => e.hint(),
            Self::Train(e) => e.hint(),
            Self::Eval(e) => e.hint(),
            Self::Verify(e) => e.hint(),
            Self::Bench(e) => e.hint(),
            Self::Report(e) => e.hint(),
            Self::Disproved { .. } => Some("this is a defect of kvtune: please report it with the table above".into()),
            Self::Imprecise { .. } => {
                Some("this is too coarse for the model and its data: keep more, `\"plain\"` is exact".into())
            }
            Self::OtherChoices { .. } => Some(
                "in f64 this is a defect of kvtune: please report it; in f32 rounding may decide between two entries: write the choices \
                 with `--dump`, and follow them with `--replay-log`"
                    .into(),
            ),
            Self::DoctorFailed { .. } => {
                Some("the lines above say what to do; `--device cpu` works without CUDA, and `kvtune doctor --device cpu` looks without it".into())
            }
            Self::Defect { .. } => Some("please report it with the command and these lines; saved checkpoints are intact".into()),
            Self::Usage { hint, .. } => Some(hint.clone()),
        }
    }
}
