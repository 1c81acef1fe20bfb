//! Stores, in which tensors wait: plain or quantised, in the host's memory or in a file.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tch::{Kind, Tensor};

use super::arena::{Arena, StoreUsage};
#[cfg(test)]
use super::copier::Copier;
use super::segments::aligned;
use super::{Bits, blocks};
use crate::native::locked;
use crate::recipe::StoreForm;
use crate::units::Bytes;

impl StoreForm {
    /// How a tensor of `kind` waits: what is no float, and what is empty, is kept to the bit.
    ///
    /// `int8` has a ninth bit that halves the step, and `int4` a fifth: a bit more costs less than shorter blocks do (`docs/reference/costs.md`).
    pub(super) fn bits_of(self, size: &[i64], kind: Kind) -> Option<Bits> {
        let is_float = matches!(kind, Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double);
        let rounds = is_float && size.iter().all(|&n| n > 0);
        match self {
            Self::Int8 if rounds => Some(Bits::Nine),
            Self::Int4 if rounds => Some(Bits::Five),
            _ => None,
        }
    }

    /// What a tensor takes in a store, before there is one; channels that would be kept apart are left out.
    pub fn bytes_of(self, size: &[i64], kind: Kind) -> Bytes {
        let plain = size.iter().product::<i64>() as u64 * kind.elt_size_in_bytes() as u64;
        let parts = self.bits_of(size, kind).map_or([plain, 0], |bits| blocks::bytes(size, bits));
        Bytes(parts.into_iter().map(aligned).sum())
    }
}

/// A store. Clones share their room.
#[derive(Clone, Debug)]
pub struct Store {
    form: StoreForm,
    pub(super) arena: Arc<Mutex<Arena>>,
}

impl Store {
    pub fn in_memory(form: StoreForm) -> Self {
        Self { form, arena: Arc::new(Mutex::new(Arena::in_memory())) }
    }

    /// A store in a scratch file in `dir`. It is made when the first tensor comes, which fails without a directory.
    pub fn in_file(form: StoreForm, dir: Option<PathBuf>) -> Self {
        Self { form, arena: Arc::new(Mutex::new(Arena::in_file(dir))) }
    }

    pub fn form(&self) -> StoreForm {
        self.form
    }

    pub fn bytes(&self) -> StoreUsage {
        locked(&self.arena).usage()
    }

    /// How long the host has copied into it and out of it, since it was made.
    pub fn copied(&self) -> Duration {
        locked(&self.arena).copied
    }

    #[cfg(test)]
    pub(super) fn copied_by(form: StoreForm, copier: Arc<dyn Copier>) -> Self {
        Self { form, arena: Arc::new(Mutex::new(Arena::copied_by(copier))) }
    }
}

pub fn bytes_of<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Bytes {
    Bytes(tensors.into_iter().map(|x| (x.numel() * x.kind().elt_size_in_bytes()) as u64).sum())
}

#[cfg(test)]
mod tests {
    use tch::{Device, Tensor};

    use super::*;
    use crate::store::Waiting;

    const CPU: Device = Device::Cpu;

    /// A store of each place, and the directory that must outlive it.
    fn both(form: StoreForm) -> ([Store; 2], tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        ([Store::in_memory(form), Store::in_file(form, Some(dir.path().join("s")))], dir)
    }

    #[test]
    fn every_kind_and_shape_comes_back_to_the_bit() {
        let base = Tensor::randn([3, 4, 6], (Kind::Double, CPU)) * 100.0;
        let (stores, _dir) = both(StoreForm::Plain);
        for store in &stores {
            let mut all: Vec<Tensor> =
                [Kind::Double, Kind::Float, Kind::Half, Kind::BFloat16, Kind::Int64, Kind::Int16, Kind::Uint8]
                    .map(|kind| base.abs().to_kind(kind))
                    .into();
            all.extend([base.transpose(0, 2), base.narrow(1, 1, 2), base.narrow(0, 0, 0), base.sum(Kind::Double)]);
            let parked: Vec<Waiting<Tensor>> = all.iter().map(|x| store.offload(x).unwrap()).collect();
            for (x, parked) in all.iter().zip(&parked) {
                let found = parked.fetch(CPU).unwrap();
                assert_eq!((found.kind(), found.size()), (x.kind(), x.size()));
                assert!(found.equal(x), "{x:?}");
            }
        }
    }

    #[test]
    fn what_is_fetched_stays_when_its_room_is_used_again() {
        let (stores, _dir) = both(StoreForm::Plain);
        for store in &stores {
            let x = Tensor::randn([64, 8], (Kind::Float, CPU));
            let parked = store.offload(&x).unwrap();
            let found = parked.fetch(CPU).unwrap();
            drop(parked);
            let _other = store.offload(&(&x + 1.0)).unwrap();
            assert!(found.equal(&x));
        }
    }

    #[test]
    fn room_is_used_again_and_counted() {
        for form in [StoreForm::Plain, StoreForm::Int8, StoreForm::Int4] {
            let (stores, dir) = both(form);
            for store in &stores {
                let mut after_first = None;
                for step in 0..4 {
                    let x = Tensor::randn([1, 256, 512], (Kind::Float, CPU));
                    // Other lengths in other steps, never more than at first.
                    let mut parked: Vec<Waiting<Tensor>> =
                        (0..6).map(|i| store.offload(&x.narrow(1, 0, 256 - (step * i) % 40)).unwrap()).collect();
                    parked.drain(1..3);
                    parked.extend((0..2).map(|_| store.offload(&x.narrow(1, 0, 100)).unwrap()));
                    assert_eq!(store.bytes().in_use, Bytes(parked.iter().map(|p| p.bytes_in_store().0).sum()));
                    let taken = store.bytes();
                    let (most, file) = *after_first.get_or_insert((taken.most, taken.file));
                    assert_eq!((taken.most, taken.file), (most, file), "{form:?}, step {step}");
                }
                assert_eq!(store.bytes().in_use, Bytes(0));
            }
            assert_eq!(stores[0].bytes().file, Bytes(0));
            assert!(stores[1].bytes().file >= stores[1].bytes().most);
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn bytes_of_a_value() {
        let x = Tensor::randn([4, 100, 1024], (Kind::Float, CPU));
        for (form, expected) in [(StoreForm::Plain, 4.0), (StoreForm::Int8, 1.1875), (StoreForm::Int4, 0.6875)] {
            let parked = Store::in_memory(form).offload(&x).unwrap();
            assert_eq!(parked.bytes_in_store(), form.bytes_of(&x.size(), x.kind()));
            let found = parked.bytes_in_store().0 as f64 / x.numel() as f64;
            assert!((found - expected).abs() < 1e-3, "{form:?}: {found}");
        }
    }

    #[test]
    fn quantised_tensors_keep_kind_and_shape_and_whole_numbers_stay_exact() {
        for form in [StoreForm::Int8, StoreForm::Int4] {
            let (stores, _dir) = both(form);
            for store in &stores {
                for kind in [Kind::Double, Kind::Float, Kind::BFloat16] {
                    let x = Tensor::randn([2, 9, 200], (kind, CPU));
                    let found = store.offload(&x).unwrap().fetch(CPU).unwrap();
                    assert_eq!((found.kind(), found.size()), (kind, x.size()));
                    let worst = (found - &x).abs().max().double_value(&[]);
                    assert!(worst > 0.0 && worst < if form == StoreForm::Int8 { 0.02 } else { 0.2 }, "{form:?}: {worst}");
                }
                let whole = Tensor::arange(1000, (Kind::Int64, CPU)) * 1_000_003;
                assert!(store.offload(&whole).unwrap().fetch(CPU).unwrap().equal(&whole));
                let none = Tensor::zeros([0, 64], (Kind::Float, CPU));
                assert_eq!(store.offload(&none).unwrap().fetch(CPU).unwrap().size(), [0, 64]);
            }
        }
    }

    #[test]
    fn a_file_without_a_directory_is_refused() {
        let store = Store::in_file(StoreForm::Plain, None);
        let error = store.offload(&Tensor::zeros([4], (Kind::Float, CPU))).unwrap_err();
        assert_eq!(error.to_string(), "no directory is given for scratch files");
        assert_eq!(store.bytes(), StoreUsage::default());
    }
}
