//! Proofs on a GPU: the crown, another program's numbers, bf16 beside f32, the same bits every time, weights that arrive whole, kernels
//! and copies.
//!
//! Without one each test says that it is skipped, and why. `tests/device/run.sh` runs this binary on another machine.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test that cannot go on fails, and says what it saw or why it saw nothing"
)]

mod copies;
#[path = "../golden/fixture.rs"]
mod fixture;
mod gpu;
mod kernels;
#[path = "../support/mod.rs"]
mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use fixture::{BY_MASK, ITS_OWN};
use kvtune::engine::{MicroBatchGradients, NoObserver, Session, SessionSpec, decode_step};
use kvtune::model::{Model, ModelSource};
use kvtune::native::cuda::{Numerics, Upload, graph_replays, pinned};
use kvtune::recipe::{BufferKind, Dtype, Storage};
use support::case::{Case, NEAR_BF16, PLAIN, Trains, Width, cosine_of_bf16, registered_policies, run};
use support::grid::each_policy;
use support::syncs::syncs_of_step;
use tch::{Device, Kind, Tensor};

/// The bound of f32 on a GPU, whose sums have another order than the reference's; and that of f64, in which entries that are rounded
/// do not fall to the other side of a level for it.
const BOUND_F32: f64 = 1e-4;
const BOUND_F64: f64 = 1e-11;

/// Beside every policy by itself and under buffers, heads and tilings in turn, what a GPU does otherwise than a CPU, or might: where things wait, what is sorted, how entries
/// are stored.
const FURTHER: &[Case] = &[
    Case { name: "dense, growing", policy: "dense", cache: &[16], storage: Storage::Growing, ..PLAIN },
    Case { name: "dense, paged", policy: "dense", cache: &[16], chunk: 3, storage: Storage::Paged, ..PLAIN },
    Case { name: "h2o, one layer band", layers_per_cell: 3, width: Width::Chunks(2), ..PLAIN },
    Case { name: "h2o, one KV head", heads: (8, 1), ..PLAIN },
    Case { name: "h2o, dropout", dropout: 0.1, ..PLAIN },
    Case { name: "h2o, all weights", trains: Trains::All, lora: &[], ..PLAIN },
    Case { name: "h2o, all weights, tied", trains: Trains::AllTied, lora: &[], ..PLAIN },
    Case { name: "h2o-vlen, prefill scored", policy: "h2o-vlen", params: "grace_period = 3\nscore_prefill = true", ..PLAIN },
    Case { name: "snapkv, narrow", policy: "snapkv", params: "kernel_size = 3", ..PLAIN },
];

fn cases() -> Vec<Case> {
    [registered_policies(), each_policy(), FURTHER.to_vec()].concat()
}

fn cases_of_adapters() -> Vec<Case> {
    cases().into_iter().filter(|case| case.trains == Trains::Adapter).collect()
}

/// The GPU that the proofs run on; without one, says so.
fn gpu() -> Option<Device> {
    static NUMERICS: Once = Once::new();
    let device = gpu::gpu()?;
    NUMERICS.call_once(|| Numerics { allows_tf32: false, is_deterministic: true }.set());
    Some(device)
}

/// Checks every case, and fails afterwards if any did: a machine with a GPU is rarely at hand.
fn each(cases: &[Case], mut check: impl FnMut(&Case)) {
    let failed: Vec<&str> =
        cases.iter().filter(|case| catch_unwind(AssertUnwindSafe(|| check(case))).is_err()).map(|case| case.name).collect();
    assert!(failed.is_empty(), "{} of {} cases fail: {}", failed.len(), cases.len(), failed.join(", "));
}

fn gradients_are_exact(kind: Kind, bound: f64, cases: &[Case]) {
    let Some(device) = gpu() else { return };
    let mut worst: f64 = 0.0;
    each(cases, |case| {
        let found = run(&Case { kind, device, ..*case });
        worst = worst.max(found.worst());
        assert!(found.worst() <= bound, "{} in {kind:?}: worst error {:.2e}", case.name, found.worst());
        assert!(found.untested().is_empty(), "{}: untested {:?}", case.name, found.untested());
    });
    println!("crown in {kind:?}: worst error {worst:.2e}");
}

#[test]
fn gradients_in_f32_are_those_of_masked_dense_autograd() {
    let plain: Vec<Case> = cases().into_iter().filter(|case| case.buffer == BufferKind::Plain).collect();
    gradients_are_exact(Kind::Float, BOUND_F32, &plain);
}

#[test]
fn gradients_in_f64_are_those_of_masked_dense_autograd() {
    gradients_are_exact(Kind::Double, BOUND_F64, &cases());
}

#[test]
fn another_programs_numbers_come_out() {
    let Some(device) = gpu() else { return };
    for name in ["dense96", "lastrec-g4", "h2o", "h2o-lpc2-cpcm2", "h2o-vlen", "h2o-orig", "h2o-grace4-fixed", "h2o-cls"] {
        fixture::check(name, ITS_OWN, device);
    }
    fixture::check("h2o-mixed", BY_MASK, device);
}

#[test]
fn bf16_is_near_f32() {
    let Some(device) = gpu() else { return };
    let mut plain = cases_of_adapters();
    plain.retain(|case| case.buffer == BufferKind::Plain);
    each(&plain, |case| {
        let cosine = cosine_of_bf16(&Case { device, ..*case });
        println!("{} in bf16: cosine {cosine:.6}", case.name);
        assert!(cosine >= NEAR_BF16, "{}: {cosine}", case.name);
    });
}

fn gradients(case: &Case, model: &Model) -> MicroBatchGradients {
    support::engine(case, model).gradients(model, &support::batch(case), support::context(case), &mut NoObserver).unwrap()
}

/// Says what the host waits for inside the rows of a step, where on a CPU there is nothing.
#[test]
fn what_the_host_waits_for_is_counted() {
    let Some(device) = gpu() else { return };
    for case in registered_policies() {
        let found = syncs_of_step(&Case { device, ..case });
        println!("{}: the host waits for {}", case.name, if found.is_empty() { "nothing".to_owned() } else { found.join(", ") });
        // Its budgets decide how long the buffers are.
        assert!(found.is_empty() || case.policy == "adakv", "{}", case.name);
    }
}

fn two_runs_repeat(kind: Kind) {
    let Some(device) = gpu() else { return };
    each(&cases_of_adapters(), |case| {
        let case = Case { kind, device, ..*case };
        let model = support::model(&case);
        let (first, second) = (gradients(&case, &model), gradients(&case, &model));
        assert_eq!(first.log.hash(), second.log.hash(), "{} in {kind:?}: choices", case.name);
        for (name, gradient) in &first.gradients {
            assert!(gradient.equal(&second.gradients[name]), "{} in {kind:?}: {name}", case.name);
        }
    });
}

#[test]
fn two_runs_in_f32_give_the_same_bits() {
    two_runs_repeat(Kind::Float);
}

#[test]
fn two_runs_in_bf16_give_the_same_bits() {
    two_runs_repeat(Kind::BFloat16);
}

/// The hidden states of a prompt and of tokens behind it, which two sessions get side by side, at fixed widths.
fn decoded(case: &Case, model: &Model) -> Vec<Tensor> {
    let engine = support::engine(case, model);
    let mut layers = engine.settings().session_layers(2, case.device).unwrap();
    let ids = (Tensor::arange(60, (Kind::Int64, case.device)) * 5).remainder(23).unsqueeze(0) + 2;
    let mut session = Session::new(&engine, model, &SessionSpec::new(1, 60)).unwrap();
    let mut hidden = Vec::new();
    while session.num_tokens() < 40 {
        let from = session.num_tokens() as i64;
        let sink = &mut |_: usize, column: &Tensor| hidden.push(column.copy());
        session.extend_by_column(&engine, model, &mut layers, &ids.narrow(1, from, 40 - from), Some(sink)).unwrap();
    }
    let mut sessions = [session.fork().unwrap(), session];
    for id in 0..20 {
        let mut both: Vec<&mut Session> = sessions.iter_mut().collect();
        hidden.push(decode_step(&engine, model, &mut layers, &mut both, &[id, id + 1], 2).unwrap());
    }
    hidden
}

/// The same bits with CUDA graphs as without, for every policy, and that graphs were launched.
fn captured_layers_repeat(kind: Kind) {
    let Some(device) = gpu() else { return };
    let mut captured = cases_of_adapters();
    // What grows has no fixed width, and layers whose policy asks the model for a number of each entry are not captured.
    captured.retain(|case| case.storage == Storage::Preallocated && !["defensivekv", "learned"].contains(&case.policy));
    each(&captured, |case| {
        let cache = if case.cache[0] >= 44 { &[80][..] } else { case.cache };
        let plain = Case { kind, device, lengths: &[60], cache, chunk: 4, width: Width::Chunks(1), is_static: true, ..*case };
        let model = support::model(&plain);
        let (expected, before) = (decoded(&plain, &model), graph_replays());
        let found = decoded(&Case { has_cuda_graphs: true, ..plain }, &model);
        assert!(graph_replays() > before, "{}: nothing was captured", case.name);
        let are_equal = expected.iter().zip(&found).all(|(a, b)| a.equal(b));
        assert!(are_equal, "{} in {kind:?}", case.name);
    });
}

#[test]
fn captured_layers_in_f32_decode_to_the_same_bits() {
    captured_layers_repeat(Kind::Float);
}

#[test]
fn captured_layers_in_bf16_decode_to_the_same_bits() {
    captured_layers_repeat(Kind::BFloat16);
}

#[test]
fn products_of_f32_are_made_in_full_and_those_of_bf16_summed_in_f32() {
    let Some(device) = gpu() else { return };
    assert_eq!(Numerics::now(), (Numerics { allows_tf32: false, is_deterministic: true }, true));
    let drawn = |seed| support::normal(seed, &[256, 4096], 1.0);
    // A plain sum of n products in f32 has an error of about 0.4 · √n · 2⁻²⁴, here 1.6e-6; factors in TF32 would have one of 3e-4.
    for (kind, bound) in [(Kind::Float, 5e-6), (Kind::BFloat16, 3e-3)] {
        let [x, y] = [1, 2].map(|seed| drawn(seed).to_kind(kind));
        let expected = x.to_kind(Kind::Double).matmul(&y.to_kind(Kind::Double).tr());
        let found = x.to_device(device).matmul(&y.to_device(device).tr()).to_device(Device::Cpu).to_kind(Kind::Double);
        let error = f64::try_from((found - &expected).norm() / expected.norm()).unwrap();
        assert!(error <= bound, "{kind:?}: {error:.1e}");
    }
}

#[test]
fn weights_arrive_as_they_lie_in_the_file() {
    let Some(device) = gpu() else { return };
    // Longer than a stretch, and no multiple of one.
    let count = (70 << 20) + 13;
    let sent = Tensor::arange(count, (Kind::Int, Device::Cpu)).remainder(251).to_kind(Kind::Uint8);
    let bytes: Vec<u8> = Vec::try_from(&sent).unwrap();
    let there = Upload::to(device).bring(&bytes, &[count], Kind::Uint8).unwrap();
    assert_eq!(there.device(), device);
    assert!(there.to_device(Device::Cpu).equal(&sent));
    assert!(pinned(1 << 20).unwrap().is_pinned(device));
    let ids = Tensor::from_slice(&[5_i64, 6, 400]).view([1, 3]);
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let load = |device| Model::load(&fixture::fixture("model-qwen2"), dtype, device).unwrap();
        let (here, there) = (load(Device::Cpu), load(device));
        assert!(there.embed(&ids.to_device(device)).to_device(Device::Cpu).equal(&here.embed(&ids)), "{dtype}");
    }
}

#[test]
fn weights_are_drawn_where_they_lie() {
    let Some(device) = gpu() else { return };
    let model = Model::load(ModelSource::from(&fixture::fixture("model-qwen2")).drawn(), Dtype::Bf16, device).unwrap();
    let ids = Tensor::arange(512, (Kind::Int64, device)).view([1, 512]);
    let embedded = model.embed(&ids).to_kind(Kind::Float);
    let spread = embedded.std(true).double_value(&[]);
    assert!((spread / model.config().initializer_range - 1.0).abs() < 0.05, "{spread}");
}
