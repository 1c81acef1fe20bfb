//! On a CUDA device: copies that go beside what it computes bring what copies at once bring. Without one each test says that it was
//! skipped, and why.

use kvtune::engine::NoObserver;
use kvtune::native::cuda::wait;
use kvtune::recipe::BufferKind;
use kvtune::recipe::StoreForm;
use kvtune::store::{Store, Waiting, copier_of};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use tch::{Device, Kind, Tensor};

use super::gpu::gpu;
use super::support;
use super::support::case::{Case, PLAIN, Width};
use super::support::syncs::NotesOfStep;

/// Keeps the device busy, so that copies which do not wait for it come too early.
fn work(device: Device) -> Tensor {
    let x = Tensor::ones([2048, 2048], (Kind::Float, device)) / 2048.0;
    (0..8).fold(x.shallow_clone(), |y, _| y.matmul(&x))
}

#[test]
fn what_is_put_and_fetched_in_any_order_comes_back() {
    let Some(device) = gpu() else { return };
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for form in [StoreForm::Plain, StoreForm::Int8] {
        let (store, on_host) = (Store::in_memory(form), Store::in_memory(form));
        let mut parked: Vec<(Waiting<Tensor>, Tensor)> = Vec::new();
        for round in 0..300 {
            let sequences = rng.random_range(1i64..400);
            let busy = work(device);
            // Computed behind the work, and gone as soon as it was sent.
            let x = (Tensor::arange(sequences * 256, (Kind::Float, device)) * 1e-3 + f64::from(round)).view([sequences, 256])
                + busy.get(0).get(0) * 0.0;
            let host = x.to_device(Device::Cpu);
            parked.push((store.offload(&x).unwrap(), on_host.offload(&host).unwrap().fetch(Device::Cpu).unwrap()));
            drop(x);
            if parked.len() > 6 {
                let (mut waiting, expected) = parked.swap_remove(rng.random_range(0..parked.len()));
                waiting.leave(device).unwrap();
                let found = waiting.wait(device).unwrap().to_device(Device::Cpu);
                let worst = (found - expected).abs().max().double_value(&[]);
                assert!(worst <= if form == StoreForm::Plain { 0.0 } else { 2e-3 }, "{form:?}, round {round}: {worst}");
            }
        }
        assert!(store.bytes().pinned.0 > 0, "memory of the host could not be pinned");
    }
}

#[test]
fn what_is_sent_away_returns() {
    let Some(device) = gpu() else { return };
    let x = Tensor::randn([512, 512], (Kind::Float, device));
    let expected = (&x + work(device).get(0).get(0) * 0.0).to_device(Device::Cpu);
    let mut away = Waiting::send(&(&x + work(device).get(0).get(0) * 0.0));
    assert!(away.on_host().equal(&expected));
    assert!(away.wait(device).unwrap().to_device(Device::Cpu).equal(&expected));
}

#[test]
fn waits_are_measured() {
    let Some(device) = gpu() else { return };
    let (store, copier) = (Store::in_memory(StoreForm::Plain), copier_of(device));
    let parked = store.offload(&Tensor::zeros([64 << 20], (Kind::Float, device))).unwrap();
    copier.measure(true);
    let fetched = parked.fetch(device).unwrap();
    wait(device);
    let waited = copier.waited().unwrap().0;
    copier.measure(false);
    // 256 MiB, at less than 1 TB/s.
    assert!(waited > 2e-4 && waited < 10.0, "{waited} seconds");
    drop(fetched);
}

#[test]
fn a_step_gives_what_the_cpu_gives_and_waits_for_nothing() {
    let Some(device) = gpu() else { return };
    let lastrec = Case { policy: "lastrec", params: "init_grace_tokens = 3", ..PLAIN };
    for case in [
        PLAIN,
        lastrec,
        Case { layers_per_cell: 3, ..PLAIN },
        Case { width: Width::Chunks(1), ..lastrec },
        Case { is_offloaded: true, layers_per_cell: 3, buffer: BufferKind::Int8, ..lastrec },
    ] {
        let of_device = Case { device, ..case };
        let (here, there) = (support::model(&case), support::model(&of_device));
        let (batch, context) = (support::batch(&case), support::context(&case));
        let expected = support::engine(&case, &here).gradients(&here, &batch, context, &mut NoObserver).unwrap();
        let engine = support::engine(&of_device, &there);
        // What is made once for all steps may wait: memory, handles of libraries.
        engine.gradients(&there, &batch, context, &mut NoObserver).unwrap();
        let mut notes = NotesOfStep::begin();
        let found = engine.gradients(&there, &batch, context, &mut notes).unwrap();
        assert_eq!(notes.syncs(), Vec::<String>::new(), "{case:?}");
        assert_eq!(found.log.hash(), expected.log.hash(), "{case:?}");
        for (name, gradient) in &expected.gradients {
            let theirs = found.gradients[name].to_device(Device::Cpu);
            let worst = (theirs - gradient).abs().max().double_value(&[]) / gradient.abs().max().double_value(&[]).max(1e-30);
            assert!(worst < 1e-9, "{name}: {worst:.2e} of {case:?}");
        }
    }
}
