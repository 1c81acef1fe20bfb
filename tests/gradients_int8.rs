//! Layer checkpoints in 8 bits: how far the gradient may be from the exact one, also where one residual channel outshouts the rest.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on fails, and says what it saw")]

mod support;

use std::collections::BTreeMap;

use kvtune::engine::Silent;
use kvtune::verify::{Comparison, reference_gradients};
use support::case::{Case, EXACT, HeadKind, PLAIN, TargetsAt, Width, prove};
use tch::{Kind, Tensor};

/// Of the gradient as a whole.
const SMALLEST_COSINE: f64 = 0.9999;
/// Of the gradient as a whole. No code of 8 bits leaves less than 1/256 of normally distributed hidden states, which is 0.4 %; these
/// blocks leave 0.42 %, and the layers behind them make 0.2 % to 0.65 % of it.
const LARGEST_ERROR: f64 = 7e-3;
/// Of any single matrix.
const SMALLEST_COSINE_OF_A_MATRIX: f64 = 0.9998;

const CASES: [Case; 6] = [
    Case { policy: "dense", cache: &[50], ..PLAIN },
    Case { policy: "lastrec", params: "init_grace_tokens = 3", ..PLAIN },
    PLAIN,
    Case { layers_per_cell: 2, width: Width::Chunks(1), ..PLAIN },
    Case { targets: TargetsAt::Last(3), ..PLAIN },
    Case { head: HeadKind::Classify, kind: Kind::Float, ..PLAIN },
];

/// All matrices in one vector.
fn flat(gradients: &BTreeMap<String, Tensor>) -> Tensor {
    let all: Vec<Tensor> = gradients.values().map(|g| g.to_kind(Kind::Double).view(-1)).collect();
    Tensor::cat(&all, 0)
}

fn check(group: &str, cases: &[Case]) {
    let (mut largest, mut smallest, mut of_a_matrix): (f64, f64, f64) = (0.0, 1.0, 1.0);
    for case in cases {
        let case = Case { is_int8: true, ..*case };
        let (model, batch, context) = (support::model(&case), support::batch(&case), support::context(&case));
        let engine = support::engine(&case, &model);
        let ours = engine.gradients(&model, &batch, context, &mut Silent).unwrap();
        let (rows, theirs) = reference_gradients(&engine, &model, &batch, &ours.log, context).unwrap();
        let found = Comparison::new((&ours.rows, &ours.gradients), (&rows, &theirs));
        // An exact gradient would mean that nothing was quantised.
        assert!(found.worst() > 1e-4 && found.untested().is_empty(), "{case:?}: {:.2e}", found.worst());
        assert!((found.loss - found.reference_loss).abs() < 1e-5, "{case:?}: the forward phase is exact");

        let (a, b) = (flat(&ours.gradients), flat(&theirs));
        let norm = |x: &Tensor| x.square().sum(Kind::Double).sqrt().double_value(&[]);
        let (error, cosine) = (norm(&(&a - &b)) / norm(&b), a.dot(&b).double_value(&[]) / (norm(&a) * norm(&b)));
        assert!(error <= LARGEST_ERROR && cosine >= SMALLEST_COSINE, "{case:?}: error {error:.2e}, cosine {cosine:.6}");
        assert!(found.smallest_cosine() >= SMALLEST_COSINE_OF_A_MATRIX, "{case:?}: {found:#?}");
        (largest, smallest) = (largest.max(error), smallest.min(cosine));
        of_a_matrix = of_a_matrix.min(found.smallest_cosine());
    }
    let [whole, matrix] = [smallest, of_a_matrix].map(|cosine| 1.0 - cosine);
    println!("{group}: error {largest:.2e}, 1 - cosine {whole:.1e}, of the worst matrix {matrix:.1e}");
}

#[test]
fn checkpoints_of_8_bits_are_nearly_exact() {
    check("int8", &CASES);
}

#[test]
fn a_loud_channel_costs_the_others_nothing() {
    let loud = CASES.map(|case| Case { has_loud_channel: true, ..case });
    prove("a loud channel, plain checkpoints", &loud);
    check("a loud channel, int8", &loud);
}

/// One row of cells has no layer checkpoint, so that there is nothing to quantise.
#[test]
fn one_row_of_cells_stays_exact() {
    let case = Case { layers_per_cell: 3, is_int8: true, ..PLAIN };
    assert!(prove("int8, one row of cells", &[case]) <= EXACT);
}
