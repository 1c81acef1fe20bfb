//! A checkpoint comes into being: written beside its place, made durable, renamed, read again, and only then do others go.

use std::cmp::Reverse;
use std::path::{Path, PathBuf};

use tch::Tensor;

use super::find::{remove_unread, saved_in};
use super::manifest::{self, Manifest};
use super::state::{OPTIMIZER, STATE};
use super::{SaveKind, TrainState};
use crate::files::{self, DirLock, FileKind, TensorHead, disk, failpoint, io_fault};
use crate::model::Model;
use crate::store;
use crate::units::{Bytes, Fault};

/// Names the newest checkpoint of a run, for people and scripts.
const LATEST: &str = "latest";

/// An optimiser's tensors, of which one at a time need be in memory.
pub trait OptimizerTensors {
    fn heads(&self) -> Result<Vec<TensorHead>, Fault>;

    /// One by its index; each is asked for once.
    fn tensor(&self, index: usize) -> Result<Tensor, Fault>;
}

impl OptimizerTensors for Vec<(String, Tensor)> {
    fn heads(&self) -> Result<Vec<TensorHead>, Fault> {
        store::tensor_heads(Path::new(OPTIMIZER), self)
    }

    fn tensor(&self, index: usize) -> Result<Tensor, Fault> {
        Ok(self[index].1.shallow_clone())
    }
}

#[derive(Clone, Copy)]
pub struct Snapshot<'a> {
    /// The model, of which what is trained is saved: its adapter, or all weights as a model directory.
    pub model: &'a Model,
    /// Name or path of the model that an adapter belongs to.
    pub base_model: &'a str,
    /// The optimiser's tensors, which all but the last checkpoint keep.
    pub optimizer: &'a dyn OptimizerTensors,
    /// Further files, by their names.
    pub beside: &'a [(String, Vec<u8>)],
    pub state: &'a TrainState,
}

/// Writes a checkpoint into `run` and removes intermediate ones as [`retain`] does. A save that fails leaves all earlier ones as they were.
pub fn save(run: &Path, snapshot: &Snapshot<'_>, keep_intermediate: usize) -> Result<PathBuf, Fault> {
    let place = run.join(snapshot.state.directory());
    let replaced = files::put_dir(&place, |staged| stage(staged, snapshot))?;
    if let Err(error) = sync_and_verify(run, &place) {
        // What stood here before is known to be good. It is put back, or stays beside the new one for a person to find.
        if let Some(old) = &replaced {
            let _ = files::replace_dir(old, &place).and_then(|_| files::sync_dir(run));
        }
        return Err(error);
    }
    // While somebody reads what stood here it stays under its other name, until the next start.
    if let Some(old) = replaced {
        remove_unread(&old)?;
    }
    set_latest(run, &snapshot.state.directory())?;
    retain(run, keep_intermediate)?;
    Ok(place)
}

/// Makes the new name durable, and reads again what it names.
fn sync_and_verify(run: &Path, place: &Path) -> Result<(), Fault> {
    files::sync_dir(run)?;
    failpoint::pass("checkpoint.verify").map_err(io_fault("read again", place))?;
    Manifest::verify(place).map(|_| ())
}

/// The name of the newest checkpoint, as the last save noted it.
pub fn latest(run: &Path) -> Option<String> {
    files::read_text(&run.join(LATEST), FileKind::Note).ok().map(|name| name.trim().to_owned())
}

pub(super) fn set_latest(run: &Path, name: &str) -> Result<(), Fault> {
    files::write_atomic(&run.join(LATEST), format!("{name}\n").as_bytes())
}

fn stage(staged: &Path, snapshot: &Snapshot<'_>) -> Result<(), Fault> {
    let state = snapshot.optimizer;
    let keeps_optimizer = snapshot.state.kind != SaveKind::Final;
    let heads = if keeps_optimizer { state.heads()? } else { Vec::new() };
    files::require_space(staged.parent().unwrap_or(staged), estimate(snapshot.model, &heads))?;
    disk::make_dir("checkpoint", staged).map_err(io_fault("make", staged))?;
    snapshot.model.save_trained(staged, snapshot.base_model)?;
    if keeps_optimizer {
        store::save_streamed(&staged.join(OPTIMIZER), &heads, &store::pt_metadata(), |index| state.tensor(index))?;
    }
    files::write_atomic(&staged.join(STATE), &files::to_json(snapshot.state))?;
    for (name, bytes) in snapshot.beside {
        files::write_atomic(&staged.join(name), bytes)?;
    }
    let manifest = Manifest::of(staged)?;
    files::write_atomic(&staged.join(manifest::NAME), &files::to_json(&manifest))?;
    files::sync_dir(staged)
}

/// A tenth more than tensors and copied files take.
fn estimate(model: &Model, state: &[TensorHead]) -> Bytes {
    let state: usize = state.iter().map(TensorHead::num_bytes).sum();
    let bytes = state as u64 + model.trained_bytes().0;
    Bytes(bytes + bytes / 10 + (1 << 16))
}

/// Removes the intermediate checkpoints beyond the last `keep_intermediate` that nobody reads, when a newer one is known to be good.
pub fn retain(run: &Path, keep_intermediate: usize) -> Result<(), Fault> {
    for (dir, _) in superseded(saved_in(run), keep_intermediate) {
        let Some(_lock) = DirLock::for_removal(&dir)? else { continue };
        // Renamed first: a crash in between leaves a leftover, never half a checkpoint under its name.
        let abandoned = files::temporary_beside(&dir);
        disk::rename("checkpoint", &dir, &abandoned).map_err(io_fault("remove", &dir))?;
        disk::remove_tree("checkpoint", &abandoned).map_err(io_fault("remove", &abandoned))?;
    }
    Ok(())
}

/// The intermediate saves beyond the last `keep`. Regular ones, best and final stay; so does the newest of all.
fn superseded(mut saved: Vec<(PathBuf, TrainState)>, keep: usize) -> impl Iterator<Item = (PathBuf, TrainState)> {
    let newest = saved.iter().map(|(_, state)| state.step).max();
    saved.retain(|(_, state)| state.kind == SaveKind::Intermediate);
    saved.sort_by_key(|(_, state)| Reverse(state.step));
    saved.into_iter().skip(keep).filter(move |(_, state)| Some(state.step) != newest)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;
    use serde_json::json;
    use tch::{Device, Kind};

    use super::super::find::candidates;
    use super::super::{abandon, clean_leftovers, load, load_optimizer, newest, set_aside};
    use super::*;
    use crate::files::failpoint::tests::with;
    use crate::model::{Adapter, EXTRA_TENSORS};
    use crate::recipe::{Dtype, LoraRecipe, ModuleSet};
    use crate::units::FaultKind;

    /// A model with an adapter of few matrices, as they are read back again and again, and an optimiser's state which tells the step.
    struct TrainedModel {
        model: Model,
        optimizer: Vec<(String, Tensor)>,
    }

    impl TrainedModel {
        fn new() -> Self {
            let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
            let model = Model::load(&fixtures.join("model-qwen2"), Dtype::F32, Device::Cpu).unwrap();
            let lora = LoraRecipe::plain(2, 4.0, 0.0, ModuleSet::Names(vec!["q_proj".into()]));
            let adapter = Adapter::new(model.config(), &lora, 1, Kind::Float, Device::Cpu).unwrap();
            Self {
                model: model.with_adapter(adapter),
                optimizer: vec![("m".into(), Tensor::zeros([3], (Kind::Float, Device::Cpu)))],
            }
        }

        fn save(&mut self, run: &Path, step: u64, kind: SaveKind, keep: usize) -> Result<PathBuf, Fault> {
            let _ = self.optimizer[0].1.fill_(step as f64);
            let state = TrainState::new(step, 7, kind, &self.model.parameters());
            let snapshot =
                Snapshot { model: &self.model, base_model: "m", optimizer: &self.optimizer, beside: &[], state: &state };
            save(run, &snapshot, keep)
        }
    }

    /// The step that a checkpoint's state and its tensors agree on.
    fn step_of(dir: &Path) -> u64 {
        let (parameters, state) = load(dir).unwrap();
        let optimizer = load_optimizer(dir).unwrap();
        assert_eq!(parameters.len(), 6);
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

    /// Lets the n-th operation of a save fail, for all n, and looks at what is left.
    fn faults(trained: &mut TrainedModel, (kind, name): (SaveKind, &str), action: &str) {
        let (plain, stays) = action.strip_suffix('+').map_or((action, ""), |plain| (plain, "+"));
        let continues = ["eintr", "short"].contains(&plain);
        let base = begun(trained);
        for n in 1.. {
            let place = place();
            let run = &place.path().join("run");
            copy(base.path(), run);
            let (result, reached) = with(&format!("any={plain}:{n}{stays}"), || trained.save(run, 3, kind, 1));
            if !reached {
                assert!(n > 34, "{n} operations are not all of a save");
            }
            if !reached || continues {
                assert_eq!(step_of(&result.unwrap()), 3, "{name}, {action}, {n}");
            } else {
                assert!(!super::super::find::is_damage(&result.unwrap_err()), "{name}, {action}, {n}");
            }
            assert_eq!(step_of(&run.join("step-000001")), 1, "{name}, {action}, {n}");
            if run.join("step-000002").exists() {
                assert_eq!(step_of(&run.join("step-000002")), 2, "{name}, {action}, {n}");
            } else {
                assert!(kind == SaveKind::Intermediate && step_of(&run.join("step-000003")) == 3, "{name}, {action}, {n}");
            }
            assert!([2, 3].contains(&step_of(&run.join("best"))), "{name}, {action}, {n}");
            assert!([2, 3].contains(&step_of(&newest(run).unwrap().dir)), "{name}, {action}, {n}");
            step_of(&run.join(latest(run).unwrap()));
            clean_leftovers(run).unwrap();
            assert_eq!(step_of(&trained.save(run, 3, kind, 1).unwrap()), 3);
            assert_eq!(latest(run).unwrap(), name);
            assert!(names(run).iter().all(|name| !files::is_temporary(name)), "{:?}", names(run));
            if !reached {
                break;
            }
        }
    }

    fn copy(from: &Path, to: &Path) {
        fs::create_dir(to).unwrap();
        for name in names(from) {
            let (from, to) = (from.join(&name), to.join(&name));
            if from.is_dir() { copy(&from, &to) } else { fs::copy(from, to).map(drop).unwrap() }
        }
    }

    #[test]
    fn wherever_a_save_fails_the_earlier_checkpoints_stay_and_the_next_save_succeeds() {
        let mut trained = TrainedModel::new();
        // A new directory, one that replaces another, and one after which another goes.
        let kinds = [(SaveKind::Regular, "step-000003"), (SaveKind::Best, "best"), (SaveKind::Intermediate, "step-000003")];
        for kind in kinds {
            faults(&mut trained, kind, "eio");
        }
        for (number, action) in ["enospc", "edquot", "eio+", "enospc+", "edquot+", "eintr", "short"].into_iter().enumerate() {
            faults(&mut trained, kinds[number % 3], action);
        }
    }

    #[test]
    fn what_has_no_name_in_pefts_files_is_read_back_with_the_adapter() {
        let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families/model-gpt-oss");
        let model = Model::load(&base, Dtype::F32, Device::Cpu).unwrap();
        let targets = ModuleSet::Names(vec!["q_proj".into()]);
        let lora = LoraRecipe { modules_to_save: vec!["sinks".into()], ..LoraRecipe::plain(2, 4.0, 0.0, targets) };
        let adapter = Adapter::new(model.config(), &lora, 1, Kind::Float, Device::Cpu).unwrap();
        let (model, run) = (model.with_adapter(adapter), place());
        let optimizer = vec![("m".to_owned(), Tensor::zeros([3], (Kind::Float, Device::Cpu)))];
        let state = TrainState::new(1, 7, SaveKind::Regular, &model.parameters());
        let snapshot = Snapshot { model: &model, base_model: "m", optimizer: &optimizer, beside: &[], state: &state };
        let dir = save(run.path(), &snapshot, 1).unwrap();
        let sorted = |mut all: Vec<(String, Tensor)>| {
            all.sort_by(|a, b| a.0.cmp(&b.0));
            all
        };
        let saved = sorted(load(&dir).unwrap().0);
        assert!(saved.iter().any(|(name, _)| name.ends_with("sinks")));
        assert_eq!(saved, sorted(model.parameters()));
        fs::remove_file(dir.join(EXTRA_TENSORS)).unwrap();
        assert!(super::super::find::is_damage(&load(&dir).unwrap_err()));
    }

    /// What can happen to a run.
    #[derive(Clone, Copy, Debug)]
    enum Happening {
        /// A save, which makes so many operations before all further ones fail.
        Save(SaveKind, u64),
        /// Somebody begins to read one of the checkpoints.
        Read(usize),
        Unread,
        /// A byte of the newest checkpoint changes, and the run is started anew.
        Damage,
        /// The run is started anew.
        Start,
    }

    fn happenings() -> impl Strategy<Value = Vec<Happening>> {
        let kind = prop::sample::select(vec![SaveKind::Regular, SaveKind::Intermediate, SaveKind::Intermediate, SaveKind::Best]);
        let whole = (kind.clone(), Just(u64::MAX)).prop_map(|(kind, n)| Happening::Save(kind, n));
        let crash = (kind, 1u64..60).prop_map(|(kind, n)| Happening::Save(kind, n));
        let read = (0usize..9).prop_map(Happening::Read);
        let rare = prop_oneof![Just(Happening::Unread), Just(Happening::Damage), Just(Happening::Start)];
        prop::collection::vec(prop_oneof![3 => whole, 2 => crash, 2 => read, 2 => rare], 1..12)
    }

    fn whole_steps(run: &Path) -> Vec<u64> {
        let dirs = names(run).into_iter().filter(|name| !name.contains('.') && name != LATEST).map(|name| run.join(name));
        dirs.filter_map(|dir| load(&dir).ok()).map(|(_, state)| state.step).collect()
    }

    proptest! {
        #[test]
        fn the_newest_and_every_regular_one_stay(
            steps in prop::collection::btree_map(1u64..40, any::<bool>(), 0..12), keep in 0usize..4,
        ) {
            let kind = |regular| if regular { SaveKind::Regular } else { SaveKind::Intermediate };
            let one = |(&step, &regular): (&u64, &bool)| {
                (PathBuf::new(), TrainState { step, kind: kind(regular), ..TrainState::default() })
            };
            let saved: Vec<(PathBuf, TrainState)> = steps.iter().map(one).collect();
            let gone: Vec<_> = superseded(saved.clone(), keep).collect();
            prop_assert!(gone.iter().all(|s| s.1.kind == SaveKind::Intermediate));
            prop_assert!(gone.iter().all(|s| Some(s.1.step) != steps.keys().max().copied()));
            let left = saved.iter().filter(|s| s.1.kind == SaveKind::Intermediate && !gone.contains(s)).count();
            prop_assert!(left <= keep.max(1));
            let oldest_left = saved.iter().filter(|s| s.1.kind == SaveKind::Intermediate && !gone.contains(s)).map(|s| s.1.step).min();
            prop_assert!(gone.iter().all(|s| oldest_left.is_none_or(|oldest| s.1.step < oldest)));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

        #[test]
        fn whatever_happens_the_newest_the_best_and_what_is_read_stay(happenings in happenings(), keep in 0usize..3) {
            let mut trained = TrainedModel::new();
            let place = place();
            let run = place.path();
            let (mut step, mut readers, mut has_best) = (0, Vec::new(), false);
            for happening in happenings {
                let before = whole_steps(run).into_iter().max();
                match happening {
                    Happening::Save(kind, operations) => {
                        step += 1;
                        let (saved, _) = with(&format!("any=eio:{operations}+"), || trained.save(run, step, kind, keep));
                        has_best |= kind == SaveKind::Best && saved.is_ok();
                        prop_assert!(saved.is_err() || whole_steps(run).contains(&step));
                    }
                    Happening::Read(which) => {
                        let all = candidates(run).unwrap();
                        if let Some((_, dir)) = all.get(which).filter(|(_, dir)| load(dir).is_ok()) {
                            readers.push((dir.clone(), DirLock::for_reading(dir).unwrap().unwrap()));
                        }
                    }
                    Happening::Unread => readers.clear(),
                    Happening::Damage if whole_steps(run).len() > 1 && readers.is_empty() => {
                        let newest_dir = newest(run).unwrap().dir;
                        has_best &= !newest_dir.ends_with("best");
                        let file = newest_dir.join(OPTIMIZER);
                        let mut bytes = fs::read(&file).unwrap();
                        *bytes.last_mut().unwrap() ^= 1;
                        fs::write(&file, bytes).unwrap();
                        let found = newest(run).unwrap();
                        set_aside(run, &found).unwrap();
                        prop_assert!(newest_dir.symlink_metadata().is_err() && newest(run).unwrap().skipped.is_empty());
                        step_of(&run.join(latest(run).unwrap()));
                        continue;
                    }
                    Happening::Damage | Happening::Start => drop(clean_leftovers(run).unwrap()),
                }
                prop_assert!(whole_steps(run).into_iter().max() >= before, "{happening:?}");
                prop_assert!(!has_best || load(&run.join("best")).is_ok());
                for (dir, _) in &readers {
                    // One that is replaced under its name stays beside it while it is read.
                    prop_assert!(load(dir).is_ok(), "{}", dir.display());
                }
            }
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused_though_its_manifest_fits() {
        let mut trained = TrainedModel::new();
        let run = begun(&mut trained);
        let run = run.path();
        let dir = run.join("step-000002");
        let whole: serde_json::Value = files::read_json(&dir.join(STATE)).unwrap();
        for (key, value, expected) in [
            ("step", json!(1u64 << 63), "`step` is 9223372036854775808, expected at most"),
            ("step", json!(3), "`step` is 3, and its directory's 2"),
            ("total_tokens", json!(u64::MAX), "`total_tokens` is"),
            ("kind", json!("best"), "`kind` is best"),
            ("best", json!({"metric": "loss", "value": 1.0, "step": 9}), "`best.step` is 9"),
            ("threads", json!(0), "`threads` is 0"),
        ] {
            let mut state = whole.clone();
            state[key] = value;
            fs::write(dir.join(STATE), files::to_json(&state)).unwrap();
            fs::write(dir.join(manifest::NAME), files::to_json(&Manifest::of(&dir).unwrap())).unwrap();
            for error in [load(&dir).unwrap_err(), newest(run).unwrap_err()] {
                assert!(
                    error.to_string().contains("can't be what this run has saved") && error.to_string().contains(expected),
                    "{error}"
                );
            }
        }
    }

    #[test]
    fn a_run_that_goes_back_leaves_what_came_after_aside() {
        let mut trained = TrainedModel::new();
        let run = begun(&mut trained);
        let run = run.path();
        trained.save(run, 4, SaveKind::Regular, 2).unwrap();
        trained.save(run, 4, SaveKind::Final, 2).unwrap();
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
        assert_eq!(newest(run).unwrap_err().kind(), FaultKind::NoCheckpoint);
        for step in [999_999, 1_000_000] {
            trained.save(run, step, SaveKind::Regular, 1).unwrap();
        }
        assert_eq!(newest(run).unwrap().dir, run.join("step-1000000"));
        fs::create_dir(run.join("step-2000000")).unwrap();
        fs::create_dir(run.join("final")).unwrap();
        fs::write(run.join("step-1000000").join(STATE), "{}").unwrap();
        let found = newest(run).unwrap();
        assert_eq!(found.dir, run.join("step-999999"));
        let told: Vec<_> =
            found.skipped.iter().map(|(dir, why)| (dir.file_name().unwrap().to_str().unwrap(), why.to_string())).collect();
        assert_eq!(told.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["final", "step-2000000", "step-1000000"]);
        assert!(told[1].1.contains("not a finished checkpoint") && told[2].1.contains("expected"), "{told:?}");
        let moved = set_aside(run, &found).unwrap();
        assert_eq!((moved.len(), moved[2].1.clone()), (3, run.join("step-1000000.damaged")));
        assert_eq!((newest(run).unwrap().skipped.len(), latest(run).unwrap()), (0, "step-999999".into()));
        trained.save(run, 1_000_000, SaveKind::Regular, 1).unwrap();
        fs::remove_file(run.join("step-1000000").join(manifest::NAME)).unwrap();
        set_aside(run, &newest(run).unwrap()).unwrap();
        assert!(run.join("step-1000000.damaged-2").exists());
        assert_eq!(super::super::names(run).unwrap(), ["step-999999"]);
    }
}
