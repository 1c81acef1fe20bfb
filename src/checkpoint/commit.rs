//! A checkpoint comes into being: written beside its place, made durable, renamed, read again, and only then do others go.

use std::fs;
use std::path::{Path, PathBuf};

use tch::Tensor;

use super::find::saved_in;
use super::manifest::{self, Manifest};
use super::state::{OPTIMIZER, STATE};
use super::{CheckpointError, TrainState, superseded};
use crate::files::{self, FileKind, FilesError, failpoint};
use crate::model::Model;
use crate::store;
use crate::units::Bytes;

/// Names the newest checkpoint of a run, for people and scripts.
const LATEST: &str = "latest";

/// What is saved.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot<'a> {
    /// The model, of which what is trained is saved: its adapter, or all weights as a model directory.
    pub model: &'a Model,
    /// Name or path of the model that an adapter belongs to.
    pub base_model: &'a str,
    /// The optimiser's tensors.
    pub optimizer: &'a [(String, Tensor)],
    /// Further files, by their names.
    pub beside: &'a [(&'a str, Vec<u8>)],
    /// The rest.
    pub state: &'a TrainState,
}

/// Writes a checkpoint into `run` and removes the intermediate ones beyond the last `keep_intermediate`. A save that fails
/// leaves all earlier checkpoints as they were.
pub fn save(run: &Path, snapshot: &Snapshot<'_>, keep_intermediate: usize) -> Result<PathBuf, CheckpointError> {
    let place = run.join(snapshot.state.directory());
    let replaced = files::put_dir(&place, |staged| stage(staged, snapshot))?;
    if let Err(error) = settle(run, &place) {
        // What stood here before is known to be good. It is put back, or stays beside the new one for a person to find.
        if let Some(old) = &replaced {
            let _ = files::replace_dir(old, &place).and_then(|_| files::sync_dir(run));
        }
        return Err(error);
    }
    if let Some(old) = replaced {
        fs::remove_dir_all(&old).map_err(FilesError::io("remove", &old))?;
    }
    set_latest(run, &snapshot.state.directory())?;
    retain(run, keep_intermediate)?;
    Ok(place)
}

/// Makes the new name durable, and reads again what it names.
fn settle(run: &Path, place: &Path) -> Result<(), CheckpointError> {
    files::sync_dir(run)?;
    failpoint::pass("checkpoint.verify").map_err(FilesError::io("read again", place))?;
    Manifest::verify(place).map(|_| ())
}

/// The name of the newest checkpoint, as the last save noted it.
pub fn latest(run: &Path) -> Option<String> {
    files::read_text(&run.join(LATEST), FileKind::Note).ok().map(|name| name.trim().to_owned())
}

/// Notes which checkpoint is the newest.
pub(super) fn set_latest(run: &Path, name: &str) -> Result<(), CheckpointError> {
    Ok(files::write_atomic(&run.join(LATEST), format!("{name}\n").as_bytes())?)
}

fn stage(staged: &Path, snapshot: &Snapshot<'_>) -> Result<(), CheckpointError> {
    files::require_space(staged.parent().unwrap_or(staged), estimate(snapshot))?;
    failpoint::pass("checkpoint.stage").and_then(|()| fs::create_dir(staged)).map_err(FilesError::io("make", staged))?;
    snapshot.model.save_trained(staged, snapshot.base_model)?;
    store::save_tensors(&staged.join(OPTIMIZER), snapshot.optimizer, &store::pt_metadata())?;
    files::write_atomic(&staged.join(STATE), &files::to_json(snapshot.state))?;
    for (name, bytes) in snapshot.beside {
        files::write_atomic(&staged.join(name), bytes)?;
    }
    let manifest = Manifest::of(staged)?;
    files::write_atomic(&staged.join(manifest::NAME), &files::to_json(&manifest))?;
    Ok(files::sync_dir(staged)?)
}

/// A tenth more than tensors and copied files take.
fn estimate(snapshot: &Snapshot<'_>) -> Bytes {
    let optimizer: usize = snapshot.optimizer.iter().map(|(_, t)| t.numel() * t.kind().elt_size_in_bytes()).sum();
    let bytes = optimizer as u64 + snapshot.model.trained_bytes().0;
    Bytes(bytes + bytes / 10 + (1 << 16))
}

/// Removes the intermediate checkpoints beyond the last `keep_intermediate`, when a newer one is known to be good.
pub fn retain(run: &Path, keep_intermediate: usize) -> Result<(), CheckpointError> {
    let saved = saved_in(run);
    let known: Vec<_> = saved.iter().map(|(_, saved)| *saved).collect();
    for gone in superseded(&known, keep_intermediate) {
        for (dir, _) in saved.iter().filter(|(_, saved)| *saved == gone) {
            // Renamed first: a crash in between leaves a leftover, never half a checkpoint under its name.
            let abandon = files::temporary_beside(dir);
            failpoint::pass("checkpoint.retire")
                .and_then(|()| fs::rename(dir, &abandon))
                .map_err(FilesError::io("remove", dir))?;
            fs::remove_dir_all(&abandon).map_err(FilesError::io("remove", &abandon))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::super::{Loaded, SaveKind, abandon, clean_leftovers, load, newest};
    use super::*;
    use crate::files::failpoint::tests::with;
    use crate::model::Adapter;
    use crate::recipe::Dtype;

    /// A model with an adapter, and an optimiser's state which tells the step.
    struct TrainedModel {
        model: Model,
        optimizer: Vec<(String, Tensor)>,
    }

    impl TrainedModel {
        fn new() -> Self {
            let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
            let model = Model::load(&fixtures.join("model-qwen2"), Dtype::F32, Device::Cpu).unwrap();
            let adapter = fixtures.join("adapter-qwen2");
            let adapter = Adapter::load_peft(&adapter, model.config(), Kind::Float, Device::Cpu).unwrap();
            Self {
                model: model.with_adapter(adapter),
                optimizer: vec![("m".into(), Tensor::zeros([3], (Kind::Float, Device::Cpu)))],
            }
        }

        fn save(&mut self, run: &Path, step: u64, kind: SaveKind, keep: usize) -> Result<PathBuf, CheckpointError> {
            let _ = self.optimizer[0].1.fill_(step as f64);
            let state = TrainState::new(step, 7, kind, &self.model.parameters());
            let snapshot =
                Snapshot { model: &self.model, base_model: "m", optimizer: &self.optimizer, beside: &[], state: &state };
            save(run, &snapshot, keep)
        }
    }

    /// The step that a checkpoint's state and its tensors agree on.
    fn step_of(dir: &Path) -> u64 {
        let Loaded { parameters, optimizer, state } = load(dir).unwrap();
        assert_eq!(parameters.len(), 42);
        assert!((optimizer[0].1.double_value(&[1]) - state.step as f64).abs() < 1e-9);
        state.step
    }

    fn names(run: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(run).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// In memory where that can be had: thousands of files are made durable here.
    fn place() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
    }

    /// A run with a step for good, an intermediate one and a best.
    fn begun(trained: &mut TrainedModel) -> tempfile::TempDir {
        let run = place();
        for (step, kind) in [(1, SaveKind::Regular), (2, SaveKind::Intermediate), (2, SaveKind::Best)] {
            trained.save(run.path(), step, kind, 1).unwrap();
        }
        run
    }

    #[test]
    fn wherever_a_save_fails_the_earlier_checkpoints_stay_and_the_next_save_succeeds() {
        let mut trained = TrainedModel::new();
        // A new directory, one that replaces another, and one after which another goes.
        for (kind, name) in
            [(SaveKind::Regular, "step-000003"), (SaveKind::Best, "best"), (SaveKind::Intermediate, "step-000003")]
        {
            for action in ["error", "enospc"] {
                let mut n = 0;
                loop {
                    n += 1;
                    let run = begun(&mut trained);
                    let run = run.path();
                    let (result, reached) = with(&format!("any={action}:{n}"), || trained.save(run, 3, kind, 1));
                    if !reached {
                        assert!(n > 35, "{n} places are not all of a save");
                        assert_eq!(step_of(&result.unwrap()), 3);
                        break;
                    }
                    assert!(!matches!(result.unwrap_err(), CheckpointError::Files(e) if e.is_about_content()), "{name}, {n}");
                    assert_eq!((step_of(&run.join("step-000001")), step_of(&run.join("step-000002"))), (1, 2), "{name}, {n}");
                    assert!([2, 3].contains(&step_of(&run.join("best"))), "{name}, {n}");
                    assert!([2, 3].contains(&step_of(&newest(run).unwrap().dir)), "{name}, {n}");
                    step_of(&run.join(latest(run).unwrap()));
                    clean_leftovers(run).unwrap();
                    assert_eq!(step_of(&trained.save(run, 3, kind, 1).unwrap()), 3);
                    assert_eq!(latest(run).unwrap(), name);
                    assert!(names(run).iter().all(|name| !files::is_temporary(name)), "{:?}", names(run));
                }
            }
        }
    }

    #[test]
    fn a_run_that_goes_back_leaves_what_came_after_aside() {
        let mut trained = TrainedModel::new();
        let run = begun(&mut trained);
        let run = run.path();
        trained.save(run, 4, SaveKind::Final, 1).unwrap();
        assert_eq!(newest(run).unwrap().dir, run.join("final"));
        assert_eq!(abandon(run, "step-000002", 2).unwrap(), Some(run.join("abandoned-1")));
        assert_eq!((newest(run).unwrap().dir, latest(run).unwrap()), (run.join("step-000002"), "step-000002".into()));
        assert_eq!(abandon(run, "step-000002", 2).unwrap(), None);
        assert_eq!(abandon(run, "step-000001", 1).unwrap(), Some(run.join("abandoned-2")));
        assert_eq!(names(run), ["abandoned-1", "abandoned-2", "latest", "step-000001"]);
        assert_eq!(
            (names(&run.join("abandoned-2")).join(" "), step_of(&run.join("abandoned-1/final"))),
            ("best step-000002".into(), 4)
        );
    }

    #[test]
    fn the_newest_is_by_number_and_what_is_unfinished_or_damaged_is_told() {
        let mut trained = TrainedModel::new();
        let run = tempfile::tempdir().unwrap();
        let run = run.path();
        assert!(matches!(newest(run), Err(CheckpointError::None { skipped, .. }) if skipped.is_empty()));
        for step in [999_999, 1_000_000] {
            trained.save(run, step, SaveKind::Regular, 1).unwrap();
        }
        assert_eq!(newest(run).unwrap().dir, run.join("step-1000000"));
        fs::create_dir(run.join("step-2000000")).unwrap();
        fs::create_dir(run.join("final")).unwrap();
        fs::write(run.join("step-1000000").join(STATE), "{}").unwrap();
        let found = newest(run).unwrap();
        assert_eq!(found.dir, run.join("step-999999"));
        let told: Vec<_> = found.skipped.iter().map(|(dir, why)| (dir.file_name().unwrap().to_str().unwrap(), why)).collect();
        assert_eq!(told.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["final", "step-2000000", "step-1000000"]);
        assert!(told[1].1.contains("not a finished checkpoint") && told[2].1.contains("expected"), "{told:?}");
    }
}
