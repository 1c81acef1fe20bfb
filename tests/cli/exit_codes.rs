//! The exit code of every error, and of those that another room passes on: one table.

use std::io;
use std::path::PathBuf;

use kvtune::checkpoint::CheckpointError;
use kvtune::engine::EngineError;
use kvtune::files::io_fault;
use kvtune::head::HeadError;
use kvtune::model::{AttendError, ConfigFault, ModelError, TensorProblems};
use kvtune::native::BackwardError;
use kvtune::native::cuda::GraphError;
use kvtune::optim::OptimError;
use kvtune::recipe::{OpenKey, RecipeError};
use kvtune::train::TrainError;
use kvtune::units::{Exit, Fault, PassedFault};

fn path() -> PathBuf {
    "x".into()
}

fn text() -> String {
    "x".into()
}

/// Holds each error, as the program sees it, to its exit code.
fn hold<E: Into<Fault>>(code: Exit, errors: Vec<E>) {
    for error in errors {
        let error = error.into();
        assert_eq!(error.exit(), code, "{error:?}");
    }
}

fn io_error(action: &'static str) -> Fault {
    io_fault(action, &path())(io::ErrorKind::NotFound.into())
}

/// Errors of files with different codes: writing failed, reading failed, the user named a link.
fn file_errors() -> [(Exit, Fault); 3] {
    [(Exit::Failed, io_error("write")), (Exit::Data, io_error("read")), (Exit::Usage, Fault::usage("x", "y"))]
}

fn recipe_error() -> RecipeError {
    RecipeError::plain(text())
}

#[test]
fn the_codes_are_those_that_scripts_know() {
    let codes = [Exit::Failed, Exit::Usage, Exit::Data, Exit::Memory, Exit::NotFinite].map(|exit| exit as u8);
    assert_eq!(codes, [1, 2, 3, 4, 5]);
}

#[test]
fn recipes() {
    hold(Exit::Usage, vec![recipe_error()]);
}

#[test]
fn models_and_checkpoints() {
    for (code, error) in file_errors() {
        hold(code, vec![ModelError::from(error)]);
    }
    let usage = vec![
        ModelError::UnknownTarget { key: "target_modules", name: text(), known: text(), near: None },
        ModelError::Lora { key: "r", found: text(), expected: "x" },
        ModelError::NotEmpty { dir: path() },
    ];
    hold(Exit::Usage, usage);
    let data = vec![
        ModelError::Config { path: path(), fault: ConfigFault::Missing { key: text(), expected: "x" } },
        ModelError::NoWeights { dir: path() },
        ModelError::Shard { index: path(), tensor: text(), file: text(), expected: "x" },
        ModelError::Tensors { dir: path(), what: "x", problems: TensorProblems::default() },
        ModelError::NothingTrained,
        ModelError::Tokenizer { message: text() },
    ];
    hold(Exit::Data, data);
    for (code, error) in file_errors() {
        hold(code, vec![CheckpointError::from(error)]);
    }
    hold(Exit::Usage, vec![CheckpointError::from(ModelError::NotEmpty { dir: path() })]);
    let data = vec![
        CheckpointError::Unfinished { dir: path() },
        CheckpointError::Damaged { path: path(), what: text() },
        CheckpointError::Contradiction { path: path(), what: text() },
        CheckpointError::Format { dir: path(), found: 2, expected: 1 },
        CheckpointError::None { run: path(), skipped: Vec::new() },
    ];
    hold(Exit::Data, data);
}

fn wrong_targets() -> HeadError {
    HeadError::WrongTargets { head: "x", expected: "x", found: "x" }
}

#[test]
fn caches_and_steps() {
    for (code, error) in file_errors() {
        hold(code, vec![EngineError::from(error)]);
    }
    // As a layer passes it on.
    for (code, error) in file_errors() {
        hold(code, vec![EngineError::from(AttendError::caused_by(PassedFault(error)))]);
    }
    hold(Exit::Failed, vec![EngineError::from(AttendError::new("x"))]);
    hold(Exit::Failed, vec![EngineError::from(AttendError::from(GraphError::Failed(text())))]);
    hold(Exit::Usage, vec![EngineError::from(AttendError::from(GraphError::Lacking(text())))]);
    let backward = || BackwardError(text());
    hold(Exit::Data, vec![EngineError::from(wrong_targets()), EngineError::EmptySequence, EngineError::NoTargets]);
    hold(Exit::Failed, vec![EngineError::from(HeadError::from(backward())), EngineError::from(backward())]);
    hold(Exit::Usage, vec![EngineError::Open { keys: vec![OpenKey::UndoLog] }]);
    let (chunk_size, longest, layer, cache_length, allowed, largest) = (14, 21, 0, 18, 15, 10);
    hold(Exit::Usage, vec![EngineError::LongestChunk { chunk_size, longest, layer, cache_length, allowed, largest }]);
    hold(Exit::Memory, vec![EngineError::OutOfMemory(text())]);
    hold(
        Exit::Failed,
        vec![EngineError::Torch(text()), EngineError::GivenUp, EngineError::Misplaced { layer: 0, stands: 1, expected: 2 }],
    );
}

#[test]
fn autograd() {
    hold(Exit::Failed, vec![BackwardError(text())]);
}

#[test]
fn training() {
    for (code, error) in file_errors() {
        hold(code, vec![TrainError::from(error)]);
    }
    for (code, error) in file_errors() {
        hold(code, vec![TrainError::Checkpoint(error.into())]);
    }
    // What was saved before is intact: that a save failed is no fault of the data.
    for (_, error) in file_errors() {
        hold(Exit::Failed, vec![TrainError::NotSaved(error.into())]);
    }
    let usage: Vec<TrainError> = vec![
        recipe_error().into(),
        ModelError::NotEmpty { dir: path() }.into(),
        Fault::from(ModelError::NotEmpty { dir: path() }).into(),
        Fault::from(EngineError::Open { keys: Vec::new() }).into(),
    ];
    hold(Exit::Usage, usage);
    let data: Vec<TrainError> = vec![EngineError::NoTargets.into(), OptimError::OtherState(text()).into()];
    hold(Exit::Data, data);
    let memory = vec![Fault::new(Exit::Memory, "x").into(), TrainError::OutOfMemory { reason: text(), advice: None }];
    hold(Exit::Memory, memory);
    let not_finite = vec![
        TrainError::NotFinite { step: 1, what: text(), samples: vec![1] },
        TrainError::LossTooHigh { step: 1, loss: 9.0, most: 8.0 },
        TrainError::UpdateNotFinite { step: 1, name: text() },
    ];
    hold(Exit::NotFinite, not_finite);
}

#[test]
fn faults_that_are_passed_on() {
    for (code, error) in file_errors() {
        hold(code, vec![TrainError::from(error)]);
    }
    hold(Exit::Usage, vec![Fault::usage("a", "b")]);
}
