//! The exit code of every error, and of those that another room passes on: one table.

use std::io;
use std::path::PathBuf;

use kvtune::cache::CacheError;
use kvtune::checkpoint::CheckpointError;
use kvtune::engine::EngineError;
use kvtune::files::FilesError;
use kvtune::head::HeadError;
use kvtune::model::{AttendError, ConfigFault, ModelError, TensorProblems};
use kvtune::native::BackwardError;
use kvtune::native::cuda::GraphError;
use kvtune::optim::OptimError;
use kvtune::recipe::{OpenKey, RecipeError};
use kvtune::store::StoreError;
use kvtune::train::TrainError;
use kvtune::units::{Bytes, Exit, Fault, LayerIdx};

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

fn io_error(action: &'static str) -> FilesError {
    FilesError::io(action, &path())(io::ErrorKind::NotFound.into())
}

/// Errors of files with different codes: writing failed, reading failed, the user named a link.
fn file_errors() -> [(Exit, FilesError); 3] {
    [(Exit::Failed, io_error("write")), (Exit::Data, io_error("read")), (Exit::Usage, FilesError::Symlink { path: path() })]
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
fn files_and_stores() {
    let content = vec![
        io_error("open"),
        io_error("read"),
        io_error("map"),
        io_error("look at"),
        FilesError::Json { path: path(), reason: text() },
        FilesError::Truncated { path: path(), expected: 2, found: 1 },
        FilesError::NotSafetensors { path: path(), reason: text() },
        FilesError::NoTensor { path: path(), name: text() },
        FilesError::NoAdapter { dir: path(), missing: "x" },
        FilesError::AdapterSettings { path: path(), settings: vec![text()] },
        FilesError::AdapterTensors { path: path(), differences: vec![text()] },
    ];
    hold(Exit::Data, content);
    let full = io::ErrorKind::StorageFull;
    let failed = vec![
        io_error("make"),
        FilesError::NoSpace { path: path(), needed: Bytes(2), free: Bytes(1) },
        FilesError::ScratchFull { dir: path(), needed: Bytes(2), free: Bytes(1), source: full.into() },
        FilesError::Locked { dir: path(), pid: None },
    ];
    hold(Exit::Failed, failed);
    for (code, error) in file_errors() {
        hold(code, vec![StoreError::from(error)]);
    }
    hold(Exit::Usage, vec![StoreError::NoScratchDir]);
    hold(
        Exit::Data,
        vec![StoreError::Dtype { path: path(), name: text(), found: text() }, StoreError::Torch { name: text(), reason: text() }],
    );
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
    hold(Exit::Usage, vec![ModelError::from(StoreError::NoScratchDir)]);
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
    hold(Exit::Usage, vec![CheckpointError::from(StoreError::NoScratchDir)]);
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

/// Each error of the cache, with its code.
fn cache_errors() -> Vec<(Exit, CacheError)> {
    let (layer, none) = (LayerIdx(0), None);
    let (chunk_size, cache_length, sinks, grace, initial, largest) = (8, 4, 1, 1, 0, 2);
    vec![
        (Exit::Usage, recipe_error().into()),
        (Exit::Data, io_error("read").into()),
        (Exit::Failed, io_error("write").into()),
        (Exit::Usage, StoreError::NoScratchDir.into()),
        (Exit::Data, CacheError::NotALog { path: path(), reason: text() }),
        (Exit::Data, CacheError::OtherLog { expected: text(), found: text() }),
        (
            Exit::Usage,
            CacheError::ChunkTooLarge { chunk_size, layer: text(), cache_length, sinks, grace, share: none, initial, largest },
        ),
        (Exit::Usage, CacheError::Full { tokens: 3, layer, cache_length: 2 }),
        (Exit::Usage, CacheError::NothingQuantised { policy: text() }),
        (Exit::Usage, CacheError::WrongNumberOfLengths { found: 1, expected: 2 }),
        (Exit::Failed, CacheError::OutOfOrder { layer, action: "write", chunk: 1, stands: 0 }),
        (Exit::Failed, CacheError::LogMismatch { layer, chunk: 1, expected: 2, found: 3 }),
    ]
}

fn wrong_targets() -> HeadError {
    HeadError::WrongTargets { head: "x", expected: "x", found: "x" }
}

#[test]
fn caches_and_steps() {
    for (code, error) in cache_errors() {
        hold(code, vec![error]);
    }
    for (code, error) in cache_errors() {
        hold(code, vec![EngineError::from(error)]);
    }
    // As a layer passes it on.
    for (code, error) in cache_errors() {
        hold(code, vec![EngineError::from(AttendError::caused_by(error))]);
    }
    hold(Exit::Failed, vec![EngineError::from(AttendError::new("x"))]);
    hold(Exit::Failed, vec![EngineError::from(AttendError::from(GraphError::Failed(text())))]);
    hold(Exit::Usage, vec![EngineError::from(AttendError::from(GraphError::Lacking(text())))]);
    let backward = || BackwardError(text());
    hold(Exit::Data, vec![EngineError::from(wrong_targets()), EngineError::EmptySequence, EngineError::NoTargets]);
    hold(Exit::Failed, vec![EngineError::from(HeadError::from(backward())), EngineError::from(backward())]);
    hold(Exit::Usage, vec![EngineError::from(StoreError::NoScratchDir), EngineError::Open { keys: vec![OpenKey::UndoLog] }]);
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
        hold(code, vec![TrainError::from(Fault::from(error))]);
    }
    hold(Exit::Usage, vec![Fault::usage("a", "b")]);
}
