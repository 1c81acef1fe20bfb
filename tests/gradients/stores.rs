//! Stores: how far the gradient is from the exact one where they round, also where one residual channel outshouts the rest, and that
//! it is exact where they don't, in memory and in a file.

use kvtune::engine::NoObserver;
use kvtune::recipe::{BufferKind, StoreForm, StorePlace, StoreRecipe};
use kvtune::units::Bytes;
use kvtune::verify::{Comparison, ErrorBound};
use tch::Kind;

use crate::support;
use crate::support::case::{Case, HeadKind, IN_FILE, IN_MEMORY, PLAIN, TargetsAt, Width, prove, run};

const CASES: [Case; 6] = [
    Case { name: "dense", policy: "dense", cache: &[50], ..PLAIN },
    Case { name: "lastrec", policy: "lastrec", params: "init_grace_tokens = 3", ..PLAIN },
    PLAIN,
    Case { name: "one chunk a cell, two layers", layers_per_cell: 2, width: Width::Chunks(1), ..PLAIN },
    Case { name: "few targets", targets: TargetsAt::Last(3), ..PLAIN },
    Case { name: "classification", head: HeadKind::Classify, kind: Kind::Float, ..PLAIN },
];

fn rounded(form: StoreForm) -> StoreRecipe {
    StoreRecipe { form, ..IN_MEMORY }
}

/// Runs the cases, asserts that each is near enough, and prints the worst of each figure.
fn check(group: &str, cases: &[Case], bound: ErrorBound) {
    let (mut smallest, mut largest, mut of_a_matrix): (f64, f64, f64) = (1.0, 0.0, 1.0);
    for case in cases {
        let found: Comparison = run(case);
        let (cosine, error) = found.whole();
        let tested = found.matrices.iter().filter(|matrix| matrix.reference_norm > 0.0);
        let of_matrices = tested.map(|matrix| matrix.cosine).fold(1.0, f64::min);
        println!("    {}: cosine {cosine:.7}, error {error:.2e}, of the worst matrix {:.6}", case.name, of_matrices);
        // An exact gradient would mean that nothing was rounded.
        assert!(error > 1e-6 && found.untested().is_empty(), "{case:?}: {error:.2e}");
        assert!((found.loss - found.reference_loss).abs() < 1e-5, "{case:?}: the forward phase is exact, and so is its loss");
        let is_near = cosine >= bound.smallest_cosine && error <= bound.largest_error;
        assert!(is_near, "{case:?}: cosine {cosine:.6}, error {error:.2e}, expected {bound:?}");
        (smallest, largest) = (smallest.min(cosine), largest.max(error));
        of_a_matrix = of_a_matrix.min(of_matrices);
    }
    println!(
        "{group}: cosine {smallest:.7}, relative error {:.3} %, cosine of the worst matrix {of_a_matrix:.6}",
        100.0 * largest
    );
}

fn layer_checkpoints(form: StoreForm, has_loud_channel: bool) -> [Case; 6] {
    CASES.map(|case| Case { layer_checkpoints: rounded(form), has_loud_channel, ..case })
}

#[test]
fn layer_checkpoints_in_int8() {
    check("layer checkpoints, int8", &layer_checkpoints(StoreForm::Int8, false), ErrorBound::of(StoreForm::Int8));
    check("the same, one channel at 1000x", &layer_checkpoints(StoreForm::Int8, true), ErrorBound::of(StoreForm::Int8));
}

#[test]
fn layer_checkpoints_in_int4() {
    check("layer checkpoints, int4", &layer_checkpoints(StoreForm::Int4, false), ErrorBound::of(StoreForm::Int4));
    check("the same, one channel at 1000x", &layer_checkpoints(StoreForm::Int4, true), ErrorBound::of(StoreForm::Int4));
}

/// Of f64.
const ROUNDING: f64 = 1e-14;

/// What may stand where, without a rounding.
const EXACT_STORES: [(StoreRecipe, StoreRecipe); 3] = [(IN_MEMORY, IN_FILE), (IN_FILE, IN_MEMORY), (IN_FILE, IN_FILE)];

#[test]
fn plain_stores_are_exact_in_memory_and_in_files() {
    // All but the last, which is in f32.
    let in_f64 = &CASES[..5];
    assert!(prove("plain stores in memory", in_f64) <= ROUNDING);
    let in_files = |&(layer_checkpoints, undo_log): &(StoreRecipe, StoreRecipe)| {
        in_f64.iter().map(move |case| Case { layer_checkpoints, undo_log, ..*case })
    };
    let in_files: Vec<Case> = EXACT_STORES.iter().flat_map(in_files).collect();
    assert!(prove("plain stores in files", &in_files) <= ROUNDING);
    let quantised = [BufferKind::Int8, BufferKind::Int4].map(|buffer| Case { buffer, undo_log: IN_FILE, ..PLAIN });
    assert!(prove("undo logs of quantised caches in files", &quantised) <= ROUNDING);
    let in_f32 = Case { layer_checkpoints: IN_FILE, undo_log: IN_FILE, ..CASES[5] };
    prove("plain stores in files, f32", &[in_f32]);
    prove("a loud channel, plain stores", &CASES.map(|case| Case { has_loud_channel: true, ..case }));
}

/// The same numbers, whatever way they have gone.
#[test]
fn a_file_gives_back_what_memory_does_to_the_bit() {
    for form in StoreForm::ALL {
        let gradients = |place| {
            let store = StoreRecipe { form: *form, place };
            let case = Case { layer_checkpoints: store, undo_log: store, ..PLAIN };
            let model = support::model(&case);
            let engine = support::engine(&case, &model);
            let batch = support::batch(&case);
            // The second step finds the room of the first.
            let step = || engine.gradients(&model, &batch, support::context(&case), &mut NoObserver).unwrap().gradients;
            let (first, taken) = (step(), [engine.stores().layer_checkpoints.bytes(), engine.stores().undo_log.bytes()]);
            assert_eq!(taken.map(|t| t.in_use), [Bytes(0); 2]);
            assert!(taken.iter().all(|t| t.most > Bytes(0) && (t.file >= t.most) == (place == StorePlace::File)), "{taken:?}");
            let second = step();
            assert_eq!([engine.stores().layer_checkpoints.bytes(), engine.stores().undo_log.bytes()], taken);
            assert!(first.iter().all(|(name, gradient)| second[name].equal(gradient)), "{form}, {place}");
            first
        };
        let (memory, file) = (gradients(StorePlace::Memory), gradients(StorePlace::File));
        assert!(memory.iter().all(|(name, gradient)| file[name].equal(gradient)), "{form}");
    }
}

/// One layer band has no layer checkpoint, and a dense cache no undo log: there is nothing to round.
#[test]
fn where_nothing_waits_nothing_is_rounded() {
    let int4 = rounded(StoreForm::Int4);
    let cases = [
        Case { layers_per_cell: 3, layer_checkpoints: int4, ..PLAIN },
        Case { undo_log: int4, ..CASES[0] },
        Case { undo_log: int4, width: Width::Chunks(1), ..CASES[0] },
    ];
    prove("nothing waits", &cases);
    for case in cases {
        assert_eq!(ErrorBound::of_stores(&support::settings(&case, &support::model(&case)), 0), None);
    }
}

#[test]
fn undo_logs_that_round() {
    let near = |smallest_cosine, largest_error| ErrorBound { smallest_cosine, largest_error };
    for (form, bound) in [(StoreForm::Int8, near(0.999_999, 0.002)), (StoreForm::Int4, near(0.9998, 0.025))] {
        // From a dense cache nothing ever leaves.
        let one_band = Case { name: "one layer band", layers_per_cell: 3, ..PLAIN };
        let cases = CASES[1..].iter().copied().chain([one_band]);
        let cases: Vec<Case> = cases.map(|case| Case { undo_log: rounded(form), ..case }).collect();
        check(&format!("undo log, {form}"), &cases, bound);
        let both: Vec<Case> = cases.iter().map(|case| Case { layer_checkpoints: rounded(form), ..*case }).collect();
        check(&format!("both, {form}"), &both, ErrorBound::of(form));
    }
}
