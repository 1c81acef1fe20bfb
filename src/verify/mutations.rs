//! The proof is itself proved: each way of getting the method wrong must be noticed.
//!
//! Each fault runs on a case on which the clean engine is exact, and where the fault can bite: a layer band below the top, as
//! the top sequence finds its caches where the forward phase left them, and several chunks a cell.

#[path = "../../tests/support/mod.rs"]
pub(crate) mod support;

use support::case::{Case, EXACT, IN_FILE, INT8, PLAIN, TargetsAt, Trains, Width};

use super::{Comparison, Proofs, Reference, TilingProof, Verdict};
use crate::engine::{MicroBatchGradients, NoObserver, Settings};
use crate::native::cuda::TorchKernel;
use crate::ops::attention::{Backend, forced};
use crate::recipe::{AttentionOutputs, BufferKind};
use crate::store::{WaitFault, with_delayed_copies};
use crate::units::Fault;
use crate::units::sabotage::{Sabotage, under};

/// An error that no rounding explains.
const NOTICED: f64 = 1e-6;

/// The engine under `fault`, and the reference on the log that it wrote.
fn compared(case: &Case, fault: Option<Sabotage>) -> Result<Comparison, Fault> {
    compared_in(case, |run| match fault {
        None => run(),
        Some(fault) => under(fault, run),
    })
}

/// What the engine makes of a case.
type Made = Result<MicroBatchGradients, Fault>;

/// The engine run as `within` says, and the reference on the log that it wrote.
fn compared_in(case: &Case, within: impl FnOnce(&dyn Fn() -> Made) -> Made) -> Result<Comparison, Fault> {
    let (model, batch, context) = (support::model(case), support::batch(case), support::context(case));
    let engine = support::engine(case, &model);
    let ours = within(&|| engine.gradients(&model, &batch, context, &mut NoObserver))?;
    Ok(Reference::new(&engine, &model, &batch, &ours.log, context)?.compare(&ours))
}

fn assert_exact(case: &Case) {
    let worst = compared(case, None).unwrap().worst();
    assert!(worst <= EXACT, "{case:?}: {worst:.2e} without a fault");
}

const WINDOWS: Case = Case { window: 7, sliding_layers: &[1, 2], ..PLAIN };

/// The fault is an error, or an error in the gradient.
fn assert_noticed(case: &Case, fault: Sabotage) {
    assert_exact(case);
    match compared(case, Some(fault)) {
        Ok(found) => assert!(found.worst() > NOTICED, "{fault:?} went unnoticed: {:.2e} on {case:?}", found.worst()),
        Err(e) => println!("{fault:?}: {e}"),
    }
}

/// What computes on other devices, with a kernel for the CPU in the place of those for CUDA: kernels of parts that are merged, and one that
/// sees past and chunk at once.
#[test]
fn every_way_to_attend_is_exact() {
    for way in [Backend::Blocks, Backend::Parts(TorchKernel::Cpu), Backend::Joined(TorchKernel::Cpu)] {
        for case in [
            LASTREC,
            PLAIN,
            Case { lengths: &[50, 31, 17], ..PLAIN },
            Case { layers_per_cell: 3, width: Width::Chunks(3), heads: (4, 4), ..PLAIN },
            Case { policy: "dense", cache: &[50], ..PLAIN },
            WINDOWS,
            Case { policy: "adakv", params: "floor = 0.5\npolicy.snapkv = { window_size = 2 }", ..PLAIN },
        ] {
            let worst = compared_in(&case, |run| forced::with(way, run)).unwrap().worst();
            assert!(worst <= EXACT, "{way}: {worst:.2e} on {case:?}");
        }
    }
}

const LASTREC: Case = Case { policy: "lastrec", params: "init_grace_tokens = 3", ..PLAIN };

#[test]
fn a_dropped_undo_is_noticed() {
    for case in
        [LASTREC, PLAIN, Case { layers_per_cell: 3, ..PLAIN }, Case { layers_per_cell: 3, width: Width::Chunks(1), ..PLAIN }]
    {
        assert_noticed(&case, Sabotage::UndoDropped);
    }
}

#[test]
fn a_gradient_that_is_not_zeroed_is_noticed() {
    for case in [LASTREC, PLAIN, Case { layers_per_cell: 3, width: Width::Chunks(100), ..PLAIN }] {
        assert_noticed(&case, Sabotage::GradientNotZeroed);
    }
}

#[test]
fn a_missing_merge_is_noticed() {
    for case in [LASTREC, PLAIN, Case { policy: "dense", cache: &[50], ..PLAIN }] {
        assert_noticed(&case, Sabotage::MergeMissing);
    }
}

#[test]
fn a_removed_chain_is_noticed() {
    let mlp: &[&str] = &["gate_proj", "up_proj", "down_proj"];
    for case in [
        Case { lora: mlp, ..LASTREC },
        Case { lora: mlp, ..PLAIN },
        Case { lora: mlp, targets: TargetsAt::Last(3), layers_per_cell: 3, ..PLAIN },
    ] {
        assert_noticed(&case, Sabotage::ChainRemoved);
    }
}

#[test]
fn a_value_that_moves_without_its_key_is_noticed() {
    for case in [LASTREC, PLAIN, Case { heads: (4, 4), lengths: &[44], ..PLAIN }] {
        assert_noticed(&case, Sabotage::ValueMovedWithoutKey);
    }
}

/// Where the matrix is tied, each half of its gradient would pass for the whole.
#[test]
fn a_window_of_the_wrong_size_is_noticed() {
    for case in [WINDOWS, Case { layers_per_cell: 3, width: Width::Chunks(100), ..WINDOWS }] {
        assert_noticed(&case, Sabotage::WindowTooWide);
        assert_noticed(&case, Sabotage::WindowForgets);
    }
}

#[test]
fn a_length_that_is_not_the_sequences_own_is_noticed() {
    let dynamic = r#"{"max_position_embeddings": 20, "rope_scaling": {"type": "dynamic", "factor": 2.0}}"#;
    let longrope = r#"{"max_position_embeddings": 80, "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 20,
        "short_factor": [1, 1.1, 1.2, 1.3], "long_factor": [1.2, 2, 4, 6]}}"#;
    for config in [dynamic, longrope] {
        assert_noticed(&Case { config, ..LASTREC }, Sabotage::LengthOfTheBatch);
    }
}

#[test]
fn a_dropped_gradient_of_either_end_is_noticed() {
    for trains in [Trains::All, Trains::AllTied] {
        let case = Case { trains, lora: &[], ..LASTREC };
        assert_noticed(&case, Sabotage::HeadGradientDropped);
        assert_noticed(&case, Sabotage::EmbeddingGradientDropped);
    }
}

/// The log is flipped between the phases: what the backward phase replays is not what the forward phase did.
#[test]
fn a_flipped_entry_of_the_log_is_noticed() {
    // Two chunks in every cell: a cell of one chunk in the top sequence stands in its cache already, and replays nothing.
    let width = Width::Chunks(2);
    for case in [Case { width, ..LASTREC }, Case { width, ..PLAIN }, Case { width, lora: &["o_proj"], lengths: &[44], ..PLAIN }] {
        assert_exact(&case);
        let (model, batch, context) = (support::model(&case), support::batch(&case), support::context(&case));
        let engine = support::engine(&case, &model);
        let clean = engine.gradients(&model, &batch, context, &mut NoObserver).unwrap();
        let reference = Reference::new(&engine, &model, &batch, &clean.log, context).unwrap();
        let mut flips = 0;
        for (layer, log) in clean.log.layers.iter().enumerate() {
            for span in clean.log.spans.iter().filter(|s| log.victims(s.index).is_some()) {
                let trace = engine.forward(&model, &batch, context, &mut NoObserver).unwrap();
                trace.shift_first_victim(layer, span.index);
                flips += 1;
                if let Ok(ours) = engine.backward(&model, trace, &mut NoObserver) {
                    let worst = reference.compare(&ours).worst();
                    assert!(worst > NOTICED, "layer {layer}, chunk {}: {worst:.2e} on {case:?}", span.index);
                }
            }
        }
        assert_eq!(flips, 18);
    }
}

/// Everything that is copied between the host and a device, and every way of cutting it.
pub(super) const COPIED: &[Case] = &[
    PLAIN,
    LASTREC,
    Case { name: "cells of one chunk", width: Width::Chunks(1), ..PLAIN },
    Case { name: "one layer band", layers_per_cell: 3, ..PLAIN },
    Case { name: "one layer band of one chunk", layers_per_cell: 3, width: Width::Chunks(1), ..LASTREC },
    Case { name: "one head in one sequence", policy: "tova", heads: (4, 1), lengths: &[44], layers_per_cell: 2, ..PLAIN },
    Case { name: "shares", policy: "adakv", params: "floor = 0.5\npolicy.snapkv = { window_size = 2 }", ..PLAIN },
    Case { name: "caches that wait", is_offloaded: true, layers_per_cell: 3, width: Width::Chunks(2), ..PLAIN },
    Case { name: "quantised caches that wait", is_offloaded: true, buffer: BufferKind::Int8, layers_per_cell: 3, ..PLAIN },
    Case { name: "rounded checkpoints", layer_checkpoints: INT8, ..PLAIN },
    Case { name: "rounded undo log", undo_log: INT8, layers_per_cell: 2, ..PLAIN },
    Case { name: "outputs", outputs: AttentionOutputs::Keep, ..PLAIN },
    Case {
        name: "outputs of two layers and a chunk",
        outputs: AttentionOutputs::Keep,
        layers_per_cell: 2,
        width: Width::Chunks(1),
        ..PLAIN
    },
    Case { name: "in files", layer_checkpoints: IN_FILE, undo_log: IN_FILE, ..PLAIN },
    Case { name: "all weights", trains: Trains::All, lora: &[], ..PLAIN },
    Case { name: "a few targets", targets: TargetsAt::First(7), dropout: 0.1, ..PLAIN },
];

/// As on a device that copies beside what it computes. Nothing may be read, or written over, before it has come.
#[test]
fn copies_that_come_late_change_nothing_to_the_bit() {
    for case in COPIED {
        let (model, batch, context) = (support::model(case), support::batch(case), support::context(case));
        let made = || support::engine(case, &model).gradients(&model, &batch, context, &mut NoObserver).unwrap();
        let (at_once, late) = (made(), with_delayed_copies(WaitFault::Kept, made));
        assert_eq!(at_once.losses, late.losses, "{case:?}");
        assert_eq!(at_once.log.hash(), late.log.hash(), "{case:?}");
        for (name, gradient) in &at_once.gradients {
            assert!(gradient.equal(&late.gradients[name]), "{name} of {case:?}");
        }
    }
}

/// What is on its way when it is read is noticed, wherever the engine fetches something.
#[test]
fn a_wait_that_is_lost_is_noticed() {
    for case in COPIED.iter().filter(|case| case.layer_checkpoints != IN_FILE) {
        let (model, batch, context) = (support::model(case), support::batch(case), support::context(case));
        let made = || support::engine(case, &model).gradients(&model, &batch, context, &mut NoObserver);
        let clean = made().unwrap();
        let Ok(found) = with_delayed_copies(WaitFault::Lost, made) else { continue };
        let worst = Comparison::new(&found.losses, &found.gradients, &clean.losses, &clean.gradients).worst();
        assert!(worst > NOTICED || worst.is_nan(), "unnoticed: {worst:.2e} on {case:?}");
    }
}

/// So a kept output is what the cells, and the second forward of lower bands, go on with.
#[test]
fn a_changed_output_is_noticed() {
    // Of a band of one layer the second forward needs nothing but its input.
    for layers_per_cell in [1, 2, 3] {
        for width in [Width::Chunks(1), Width::Chunks(3)] {
            let case = Case { outputs: AttentionOutputs::Keep, layers_per_cell, width, ..PLAIN };
            assert_noticed(&case, Sabotage::KeptOutputChanged);
        }
    }
}

/// What is found of all tilings of a case; `is_faulty` says which engines run under the fault.
fn tiled(case: &Case, fault: Sabotage, is_faulty: impl Fn(usize) -> bool) -> Vec<Result<TilingProof, Fault>> {
    let (model, batch, context) = (support::model(case), support::batch(case), support::context(case));
    let mut proofs = Proofs::new(&model, &batch, context);
    let engines = support::tilings(case, &model).into_iter().map(|tiling| {
        let settings = Settings::new(model.config(), &tiling.kv_cache, &tiling.grad).unwrap();
        support::engine_with(case, settings)
    });
    let prove = |(at, engine)| if is_faulty(at) { under(fault, || proofs.prove(&engine)) } else { proofs.prove(&engine) };
    engines.enumerate().map(prove).collect()
}

/// Whether a tiling is said to be wrong, or is an error.
fn is_noticed(found: &Result<TilingProof, Fault>) -> bool {
    found.as_ref().map_or(true, |found| !found.verdict(EXACT).is_good())
}

#[test]
fn no_tiling_passes_under_a_fault() {
    const SHORT: Case = Case { lengths: &[29, 23, 9], ..PLAIN };
    let all_linear = [Sabotage::UndoDropped, Sabotage::GradientNotZeroed, Sabotage::MergeMissing, Sabotage::ValueMovedWithoutKey];
    let mlp = Case { lora: &["gate_proj", "up_proj", "down_proj"], lengths: SHORT.lengths, ..LASTREC };
    let ends = [Sabotage::HeadGradientDropped, Sabotage::EmbeddingGradientDropped];
    for (case, faults) in
        [(SHORT, &all_linear[..]), (mlp, &[Sabotage::ChainRemoved]), (Case { trains: Trains::All, lora: &[], ..SHORT }, &ends)]
    {
        let clean = tiled(&case, faults[0], |_| false);
        assert!(!clean.iter().any(is_noticed), "{case:?} without a fault: {clean:?}");
        for &fault in faults {
            let found = tiled(&case, fault, |_| true);
            // Where stores round, the gradient is judged as a whole, in which a matrix with a short one does not count for much.
            let may_pass = |found: &TilingProof| fault == Sabotage::EmbeddingGradientDropped && found.bound.is_some();
            for (at, found) in found.iter().enumerate() {
                let passes = found.as_ref().is_ok_and(|found| !may_pass(found)) && !is_noticed(found);
                assert!(!passes, "{fault:?} went unnoticed in tiling {at}: {found:?} on {case:?}");
            }
        }
    }
}

#[test]
fn a_fault_in_one_tiling_is_told_of_that_one_alone() {
    let exact = support::tilings(&PLAIN, &support::model(&PLAIN)).iter().filter(|tiling| !tiling.grad.rounds()).count();
    // The shape of the first, cells of one chunk, and the last one before those that round: its undo log is a file.
    for faulty in [0, 1, exact - 1] {
        let found = tiled(&PLAIN, Sabotage::GradientNotZeroed, |at| at == faulty);
        let noticed: Vec<usize> = (0..found.len()).filter(|&at| is_noticed(&found[at])).collect();
        // Beside a wrong first one no exact one agrees.
        let expected: Vec<usize> = if faulty == 0 { (0..exact).collect() } else { vec![faulty] };
        assert_eq!(noticed, expected, "{found:?}");
    }
}

#[test]
fn choices_that_depend_on_the_tiling_are_noticed() {
    let (model, batch) = (support::model(&PLAIN), support::batch(&PLAIN));
    let mut proofs = Proofs::new(&model, &batch, support::context(&PLAIN));
    let mut verdict = |case| proofs.prove(&support::engine(&case, &model)).unwrap().verdict(EXACT);
    assert_eq!(verdict(PLAIN), Verdict::Proved);
    assert_eq!(verdict(Case { params: "grace_period = 4", layers_per_cell: 2, ..PLAIN }), Verdict::OtherChoices);
    assert_eq!(verdict(Case { layers_per_cell: 2, ..PLAIN }), Verdict::Proved);
}
