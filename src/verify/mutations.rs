//! The proof is itself proved: each way of getting the method wrong must be noticed.
//!
//! Each fault runs on a case on which the clean engine is exact, and where the fault can bite: a row of cells below the top, as
//! the top row finds its caches where the forward phase left them, and several chunks a cell.

#[path = "../../tests/support/mod.rs"]
mod support;

use support::case::{Case, EXACT, PLAIN, TargetsAt, Trains, Width};

use super::{Comparison, VerifyError, reference_gradients};
use crate::engine::Silent;
use crate::sabotage::{Sabotage, under};

/// An error that no rounding explains.
const NOTICED: f64 = 1e-6;

/// The engine under `fault`, and the reference on the log that it wrote.
fn compared(case: &Case, fault: Option<Sabotage>) -> Result<Comparison, VerifyError> {
    let (model, batch, context) = (support::model(case), support::batch(case), support::context(case));
    let engine = support::engine(case, &model);
    let run = || engine.gradients(&model, &batch, context, &mut Silent);
    let ours = match fault {
        None => run()?,
        Some(fault) => under(fault, run)?,
    };
    let (rows, theirs) = reference_gradients(&engine, &model, &batch, &ours.log, context)?;
    Ok(Comparison::new((&ours.rows, &ours.gradients), (&rows, &theirs)))
}

fn assert_exact(case: &Case) {
    let worst = compared(case, None).unwrap().worst();
    assert!(worst <= EXACT, "{case:?}: {worst:.2e} without a fault");
}

/// The fault is an error, or an error in the gradient.
fn assert_noticed(case: &Case, fault: Sabotage) {
    assert_exact(case);
    match compared(case, Some(fault)) {
        Ok(found) => assert!(found.worst() > NOTICED, "{fault:?} went unnoticed: {:.2e} on {case:?}", found.worst()),
        Err(e) => println!("{fault:?}: {e}"),
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
    // Two chunks in every cell: a cell of one chunk in the top row stands in its cache already, and replays nothing.
    let width = Width::Chunks(2);
    for case in [Case { width, ..LASTREC }, Case { width, ..PLAIN }, Case { width, lora: &["o_proj"], lengths: &[44], ..PLAIN }] {
        assert_exact(&case);
        let (model, batch, context) = (support::model(&case), support::batch(&case), support::context(&case));
        let engine = support::engine(&case, &model);
        let clean = engine.gradients(&model, &batch, context, &mut Silent).unwrap();
        let (rows, theirs) = reference_gradients(&engine, &model, &batch, &clean.log, context).unwrap();
        let mut flips = 0;
        for (layer, log) in clean.log.layers.iter().enumerate() {
            for span in clean.log.spans.iter().filter(|s| log.victims(s.index).is_some()) {
                let mut trace = engine.forward(&model, &batch, context, &mut Silent).unwrap();
                trace.log.layers[layer].shift_first_victim(span.index);
                flips += 1;
                if let Ok(ours) = engine.backward(&model, trace, context, &mut Silent) {
                    let worst = Comparison::new((&ours.rows, &ours.gradients), (&rows, &theirs)).worst();
                    assert!(worst > NOTICED, "layer {layer}, chunk {}: {worst:.2e} on {case:?}", span.index);
                }
            }
        }
        assert_eq!(flips, 18);
    }
}
