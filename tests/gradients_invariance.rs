//! What must not change a gradient: the tiling, the neighbours in a batch, the split into micro-batches, a second run.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on fails, and says what it saw")]

mod support;

use std::collections::BTreeMap;

use kvtune::data::Batch;
use kvtune::engine::{Silent, StepGradients};
use kvtune::model::Model;
use kvtune::recipe::{BufferKind, Storage};
use support::case::{Case, EXACT, PLAIN, Width};
use tch::{Kind, Tensor};

/// All that make decisions of their own, and dropout, on rows that end inside a chunk, inside the prefill span, and long before both.
const POLICIES: &[Case] = &[
    Case { policy: "dense", cache: &[50], ..PLAIN },
    Case { policy: "lastrec", params: "init_grace_tokens = 3", ..PLAIN },
    PLAIN,
    Case { params: "grace_period = 4\nkeep_initial_fraction = 0.3", ..PLAIN },
    Case { params: "normalize_scores = true", ..PLAIN },
    // More first tokens to keep than the first eviction of the longest row leaves room for.
    Case { params: "grace_period = 4\nkeep_initial_fraction = 0.4", chunk: 11, ..PLAIN },
    Case { cache: &[11, 18, 14], ..PLAIN },
    // What is drawn follows the number of the chunk, not the length of a row or its batch.
    Case { is_randomized: true, ..PLAIN },
    // Masks follow the sample and the position, not the place in a batch or a chunk.
    Case { dropout: 0.1, ..PLAIN },
    Case { policy: "h2o-vlen", params: "score_prefill = true\nnormalize_scores = true", ..PLAIN },
    Case { policy: "qh2o-vlen", params: "grace_period = 3", buffer: BufferKind::Int8, ..PLAIN },
    Case { policy: "keydiff", buffer: BufferKind::Int4, ..PLAIN },
    Case { policy: "knorm", params: "grace_period = 2", is_offloaded: true, ..PLAIN },
    Case { policy: "tova", ..PLAIN },
    Case {
        policy: "smart-lastrec",
        params: "end_initial_regex = \"###\"\nmax_initial_fraction = 0.4",
        initial: &[(0, 30), (3, 7), (1, 9), (0, 4)],
        ..PLAIN
    },
    Case { policy: "snapkv", params: "window_size = 3\nkernel_size = 3\npooling = \"mean\"", ..PLAIN },
    Case { policy: "expected-attention", params: "init_grace_tokens = 2", ..PLAIN },
    Case { policy: "adakv", params: "floor = 0.4\npolicy.snapkv = { window_size = 2 }", ..PLAIN },
    Case { policy: "adakv", params: "floor = 0.4\npolicy = \"knorm\"", cache: &[14, 25, 31], ..PLAIN },
    Case { policy: "dense", storage: Storage::Paged, buffer: BufferKind::Int8, ..PLAIN },
];

fn gradients(case: &Case, model: &Model, batch: &Batch) -> StepGradients {
    support::engine(case, model).gradients(model, batch, support::context(case), &mut Silent).unwrap()
}

fn apart(a: &Tensor, b: &Tensor) -> f64 {
    let norm = |t: &Tensor| t.square().sum(Kind::Double).sqrt().double_value(&[]);
    norm(&(a - b)) / norm(b).max(1e-30)
}

/// The largest relative difference of two sets of gradients.
fn worst(a: &BTreeMap<String, Tensor>, b: &BTreeMap<String, Tensor>) -> f64 {
    assert!(a.keys().eq(b.keys()) && !a.is_empty());
    a.iter().map(|(name, gradient)| apart(gradient, &b[name])).fold(0.0, f64::max)
}

#[test]
fn the_tiling_changes_nothing() {
    let mut largest: f64 = 0.0;
    for &case in POLICIES {
        let (model, batch) = (support::model(&case), support::batch(&case));
        let one = gradients(&Case { layers_per_cell: 3, width: Width::Chunks(100), ..case }, &model, &batch);
        for layers_per_cell in [1, 2, 3] {
            for width in [Width::Chunks(1), Width::Chunks(2), Width::Multiplier(1.0)] {
                let other = gradients(&Case { layers_per_cell, width, ..case }, &model, &batch);
                for (a, b) in one.rows.iter().zip(&other.rows) {
                    assert!((a.loss_sum - b.loss_sum).abs() <= EXACT * a.loss_sum.abs() && a.targets == b.targets);
                }
                largest = largest.max(worst(&one.gradients, &other.gradients));
            }
        }
    }
    println!("tilings: worst difference {largest:.2e}");
    assert!(largest <= EXACT);
}

#[test]
fn two_runs_are_identical_to_the_bit() {
    for &case in POLICIES {
        for kind in [Kind::Double, Kind::Float] {
            let case = Case { kind, layers_per_cell: 2, ..case };
            let (model, batch) = (support::model(&case), support::batch(&case));
            let (a, b) = (gradients(&case, &model, &batch), gradients(&case, &model, &batch));
            assert_eq!(a.rows, b.rows);
            assert!(a.gradients.iter().all(|(name, gradient)| gradient.equal(&b.gradients[name])), "{case:?}");
        }
    }
}

#[test]
fn a_padded_batch_is_its_rows_alone() {
    let mut largest: f64 = 0.0;
    for &case in POLICIES {
        for lengths in [&[44, 37, 9][..], &[1, 44, 18, 28], &[23, 40], &[44, 31, 25]] {
            let case = Case { lengths, ..case };
            let model = support::model(&case);
            let together = gradients(&case, &model, &support::batch(&case));
            let mut sums: BTreeMap<String, Tensor> = BTreeMap::new();
            for (i, row) in together.rows.iter().enumerate() {
                let alone = gradients(&case, &model, &support::single(&case, i));
                assert!((alone.rows[0].loss_sum - row.loss_sum).abs() <= EXACT * row.loss_sum, "{case:?}, row {i}");
                assert_eq!((alone.rows[0].targets, alone.rows[0].correct), (row.targets, row.correct));
                for (name, gradient) in alone.gradients {
                    let sum = sums.remove(&name).map_or_else(|| gradient.copy(), |sum| sum + &gradient);
                    sums.insert(name, sum);
                }
            }
            let error = worst(&together.gradients, &sums);
            assert!(error <= EXACT, "{case:?}: {error:.2e}");
            largest = largest.max(error);
        }
    }
    println!("padding: worst difference {largest:.2e}");
}

/// The one policy whose rows decide together, which is its definition: its rows are not what they would be alone.
#[test]
fn the_published_h2o_couples_its_rows() {
    let case = Case { policy: "h2o-orig", lengths: &[44, 41], ..PLAIN };
    let model = support::model(&case);
    assert!(support::engine(&case, &model).settings().couples_rows());
    let together = gradients(&case, &model, &support::batch(&case));
    let alone = gradients(&case, &model, &support::single(&case, 0));
    assert!((alone.rows[0].loss_sum - together.rows[0].loss_sum).abs() > 1e-6);
    let other = Case { policy: "h2o", ..case };
    assert!(!support::engine(&other, &model).settings().couples_rows());
}

#[test]
fn micro_batches_add_up_to_the_batch() {
    let mut largest: f64 = 0.0;
    for &case in POLICIES {
        let case = Case { lengths: &[44, 37, 9, 30], ..case };
        let (model, batch) = (support::model(&case), support::batch(&case));
        let whole = gradients(&case, &model, &batch);
        let mut rows = batch.rows.into_iter();
        let halves = [Batch { rows: rows.by_ref().take(1).collect() }, Batch { rows: rows.collect() }];
        let [a, b] = halves.map(|half| gradients(&case, &model, &half));
        let sums = a.gradients.iter().map(|(name, gradient)| (name.clone(), gradient + &b.gradients[name])).collect();
        largest = largest.max(worst(&whole.gradients, &sums));
    }
    println!("micro-batches: worst difference {largest:.2e}");
    assert!(largest <= EXACT);
}
