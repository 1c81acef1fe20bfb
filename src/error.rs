//! The union of all errors.

use crate::bench::BenchError;
use crate::cache::CacheError;
use crate::checkpoint::CheckpointError;
use crate::conformance::ConformanceError;
use crate::data::DataError;
use crate::dist::DistError;
use crate::engine::EngineError;
use crate::eval::EvalError;
use crate::export::ExportError;
use crate::files::FilesError;
use crate::generation::GenerationError;
use crate::inspect::InspectError;
use crate::model::ModelError;
use crate::recipe::RecipeError;
use crate::report::ReportError;
use crate::serve::ServeError;
use crate::store::StoreError;
use crate::train::TrainError;
use crate::units::{Exit, Failure};
use crate::verify::VerifyError;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// Data can't be read or used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Several ranks did not come or stay together.
    #[error(transparent)]
    Dist(#[from] DistError),
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
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A checkpoint can't be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Train(#[from] TrainError),
    /// A text could not be generated.
    #[error(transparent)]
    Generation(#[from] GenerationError),
    /// The server could not begin.
    #[error(transparent)]
    Serve(#[from] ServeError),
    #[error(transparent)]
    Eval(#[from] EvalError),
    /// The file of a policy can't be read, or a model departs from it.
    #[error(transparent)]
    Conformance(#[from] ConformanceError),
    #[error(transparent)]
    Export(#[from] ExportError),
    /// A proof could not be made.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// A run could not be looked at.
    #[error(transparent)]
    Inspect(#[from] InspectError),
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
        worst: f64,
        tolerance: f64,
    },
    /// The gradient through stores that round points elsewhere than the exact one.
    #[error("{}the gradient has the cosine {cosine:.6} with the exact one, expected at least {smallest}", with(.keys))]
    Imprecise {
        /// The keys and what they say.
        keys: String,
        cosine: f64,
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
        message: String,
        /// Where it happened, and how it came to it if `RUST_BACKTRACE` is set.
        place: String,
    },
    /// The system lets the process have too little to work with.
    #[error("{message}")]
    Limits { message: String, hint: String },
    /// The arguments contradict each other, or name what is not there.
    #[error("{message}")]
    Usage { message: String, hint: String },
}

/// `with KEYS `, if there are any.
fn with(keys: &str) -> String {
    if keys.is_empty() { String::new() } else { format!("with {keys} ") }
}

/// `a`, `b`.
fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

impl Failure for Error {
    fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Disproved { .. } => "this is a defect of kvtune: please report it with the table above".into(),
            Self::Imprecise { .. } => "this is too coarse for the model and its data: keep more, `\"plain\"` is exact".into(),
            Self::OtherChoices { .. } => {
                "in f64 this is a defect of kvtune: please report it; in f32 rounding may decide between two entries: write the choices \
                 with `--dump`, and follow them with `--replay-log`"
                    .into()
            }
            Self::DoctorFailed { .. } => {
                "the lines above say what to do; `--device cpu` works without CUDA, and `kvtune doctor --device cpu` looks without it"
                    .into()
            }
            Self::Defect { .. } => "please report it with the command and these lines; saved checkpoints are intact".into(),
            Self::Usage { hint, .. } | Self::Limits { hint, .. } => hint.clone(),
            _ => return self.origin()?.hint(),
        })
    }

    fn exit(&self) -> Exit {
        match self {
            Self::Usage { .. } => Exit::Usage,
            Self::Limits { .. } => Exit::Memory,
            _ => self.origin().map_or(Exit::Failed, Failure::exit),
        }
    }

    fn origin(&self) -> Option<&dyn Failure> {
        Some(match self {
            Self::Recipe(e) => e,
            Self::Data(e) => e,
            Self::Dist(e) => e,
            Self::Files(e) => e,
            Self::Store(e) => e,
            Self::Model(e) => e,
            Self::Cache(e) => e,
            Self::Engine(e) => e,
            Self::Checkpoint(e) => e,
            Self::Train(e) => e,
            Self::Generation(e) => e,
            Self::Serve(e) => e,
            Self::Eval(e) => e,
            Self::Conformance(e) => e,
            Self::Export(e) => e,
            Self::Verify(e) => e,
            Self::Inspect(e) => e,
            Self::Bench(e) => e,
            Self::Report(e) => e,
            _ => return None,
        })
    }
}
