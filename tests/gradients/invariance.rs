//! What must not change a gradient: the tiling, the neighbours in a batch, and so the split into micro-batches, a second run.

use std::collections::BTreeMap;

use kvtune::data::{Batch, epoch_batches};
use kvtune::engine::{MicroBatchGradients, NoObserver, Settings};
use kvtune::model::Model;
use kvtune::recipe::{BatchOrder, BatchSize, BufferKind, GradRecipe, Recipe, Storage, StoreForm, StorePlace, StoreRecipe};
use kvtune::units::Bytes;
use kvtune::verify::Proofs;
use tch::{Kind, Tensor};

use crate::support;
use crate::support::case::{Case, EXACT, HeadKind, PLAIN, Tail, TargetsAt, Trains, Width, registered_policies};
use crate::support::grid::{ACROSS_LAYERS, each_policy};

/// Every policy whose sequences decide for themselves, and what else a sequence could get from its neighbours or its tiling.
fn cases() -> Vec<Case> {
    let alone = each_policy().into_iter().filter(|case| case.policy != "h2o-orig");
    alone.chain(FURTHER.iter().copied()).collect()
}

const FURTHER: &[Case] = &[
    // More first tokens to keep than the first eviction of the longest sequence leaves room for.
    Case { params: "grace_period = 4\nkeep_initial_fraction = 0.4", chunk: 11, ..PLAIN },
    Case { params: "normalize_scores = true", cache: &[11, 18, 14], ..PLAIN },
    // What is drawn follows the number of the chunk, not the length of a sequence or its batch.
    Case { is_randomized: true, ..PLAIN },
    // Masks follow the sample and the position, not the place in a batch or a chunk.
    Case { dropout: 0.1, ..PLAIN },
    Case { policy: "adakv", params: "floor = 0.4\npolicy = \"knorm\"", cache: &[14, 25, 31], ..PLAIN },
    ACROSS_LAYERS,
    Case { policy: "dense", storage: Storage::Paged, buffer: BufferKind::Int8, ..PLAIN },
];

fn gradients(case: &Case, model: &Model, batch: &Batch) -> MicroBatchGradients {
    support::engine(case, model).gradients(model, batch, support::context(case), &mut NoObserver).unwrap()
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

/// Two runs of a case are the same to the bit.
fn assert_repeats(one: &MicroBatchGradients, again: &MicroBatchGradients, case: &Case) {
    assert_eq!(one.losses, again.losses, "{case:?}");
    assert!(one.gradients.iter().all(|(name, gradient)| gradient.equal(&again.gradients[name])), "{case:?}");
}

/// Nor does a second run, in any bit.
#[test]
fn the_tiling_changes_nothing() {
    let mut largest: f64 = 0.0;
    for (at, case) in cases().into_iter().enumerate() {
        let (model, batch) = (support::model(&case), support::batch(&case));
        let whole = Case { layers_per_cell: 3, width: Width::Chunks(100), ..case };
        let one = gradients(&whole, &model, &batch);
        // In turn, so that each case has each number of layers and each width, and any two of these meet in a third of the cases.
        let mut widths = [Width::Chunks(1), Width::Chunks(2), Width::Multiplier(1.0)];
        widths.rotate_left(at % 3);
        for (layers_per_cell, width) in [1, 2, 3].into_iter().zip(widths) {
            let tiled = Case { layers_per_cell, width, ..case };
            let other = gradients(&tiled, &model, &batch);
            if layers_per_cell == 2 {
                assert_repeats(&other, &gradients(&tiled, &model, &batch), &tiled);
            }
            for (a, b) in one.losses.iter().zip(&other.losses) {
                assert!((a.loss_sum - b.loss_sum).abs() <= EXACT * a.loss_sum.abs() && a.targets == b.targets);
            }
            largest = largest.max(worst(&one.gradients, &other.gradients));
        }
    }
    println!("tilings: worst difference {largest:.2e}");
    assert!(largest <= EXACT);
}

/// One of each kind of choice, of cache, of head and of what is trained.
const TILED: &[Case] = &[
    PLAIN,
    Case { policy: "dense", storage: Storage::Paged, ..PLAIN },
    Case { policy: "lastrec", params: "init_grace_tokens = 3", cache: &[11, 18, 14], dropout: 0.1, ..PLAIN },
    Case { policy: "qh2o-vlen", params: "grace_period = 3", buffer: BufferKind::Int8, is_offloaded: true, ..PLAIN },
    Case { policy: "adakv", params: "floor = 0.4\npolicy = \"knorm\"", cache: &[14, 25, 31], ..PLAIN },
    Case { policy: "tova", tail: Tail::OneByOne, targets: TargetsAt::Last(3), ..PLAIN },
    Case { policy: "keydiff", is_randomized: true, trains: Trains::AllTied, lora: &[], ..PLAIN },
    Case { head: HeadKind::Classify, width: Width::Multiplier(1.0), ..PLAIN },
    Case { layers: &[1, 2], ..PLAIN },
];

/// Whether a tiling has its cells for itself, and everything else as `own`.
fn differs_in_shape(tiling: &Recipe, own: &Recipe) -> bool {
    let GradRecipe { layers_per_cell, chunks_per_cell, .. } = tiling.grad;
    let grad = GradRecipe { layers_per_cell, chunks_per_cell, ..own.grad.clone() };
    *tiling == Recipe { grad, ..own.clone() }
}

/// The first, which is the recipe's own, makes the choices; the others must make the same.
#[test]
fn every_tiling_is_proved() {
    let (mut largest, mut count): (f64, usize) = (0.0, 0);
    for (at, &case) in TILED.iter().enumerate() {
        let (model, batch) = (support::model(&case), support::batch(&case));
        let mut proofs = Proofs::new(&model, &batch, support::context(&case));
        // Shapes for each case; of all else every second tiling, in turn, so that each of them meets half of the cases.
        let all = support::tilings(&case, &model);
        let own = all[0].clone();
        let (mut tilings, further): (Vec<_>, Vec<_>) = all.into_iter().partition(|tiling| differs_in_shape(tiling, &own));
        tilings.extend(further.into_iter().skip(at % 2).step_by(2));
        for tiling in tilings {
            let settings = Settings::new(model.config(), &tiling.kv_cache, &tiling.grad).unwrap();
            let found = proofs.prove(&support::engine_with(&case, settings)).unwrap();
            assert!(found.verdict(EXACT).is_good(), "{tiling:?}: {found:?}");
            let waits = |store: StoreRecipe, most| (store != StoreRecipe::PLAIN, most > Bytes(0));
            // A store that is chosen is used.
            for (is_chosen, is_used) in
                [waits(tiling.grad.layer_checkpoints, found.layer_checkpoints), waits(tiling.grad.undo_log, found.undo_log)]
            {
                assert!(is_used || !is_chosen, "{tiling:?}: {found:?}");
            }
            let is_one_row = found.cells.0 == 1;
            let is_exact = found.bound.is_none();
            assert_eq!(found.is_head_in_cells, is_one_row && is_exact, "{tiling:?}");
            if found.bound.is_none() {
                largest = largest.max(found.relative_error());
            }
            count += 1;
        }
    }
    println!("every tiling: {count}, worst error of the exact ones {largest:.2e}");
}

/// The shapes crossed, and each form and place of each store.
#[test]
fn every_tiling_is_there_once() {
    let all = support::tilings(&PLAIN, &support::model(&PLAIN));
    assert!(all.iter().enumerate().all(|(at, tiling)| !all[..at].contains(tiling)), "{all:#?}");
    let has = |of: &dyn Fn(&Recipe) -> bool| all.iter().any(of);
    // 44 tokens in chunks of 5 behind 18 that are run as 5, 5, 5 and 3.
    for layers in [1, 2, 3] {
        for chunks in [1, 2, 3, 10] {
            assert!(has(&|t| (t.grad.layers_per_cell, t.grad.chunks_per_cell) == (layers, Some(chunks))), "{layers} × {chunks}");
        }
    }
    for &form in StoreForm::ALL {
        for &place in StorePlace::ALL {
            let store = StoreRecipe { form, place };
            assert!(has(&|t| t.grad.layer_checkpoints == store) && has(&|t| t.grad.undo_log == store), "{store:?}");
        }
    }
    // Above the first layer a single band has a layer checkpoint, too.
    let upper = support::tilings(&Case { layers: &[1, 2], ..PLAIN }, &support::model(&Case { layers: &[1, 2], ..PLAIN }));
    assert!(upper.iter().enumerate().all(|(at, tiling)| !upper[..at].contains(tiling) && tiling.grad.layers_per_cell <= 2));
    let rounds = |t: &Recipe| t.grad.layers_per_cell == 2 && t.grad.layer_checkpoints.form == StoreForm::Int8;
    assert!(upper.iter().any(rounds), "{upper:#?}");
    assert!(has(&|t| t.kv_cache.cpu_offload) && all.iter().all(|t| t.kv_cache.storage == Storage::Preallocated));
    // The recipe's own comes first, and is no other, in whatever way it says its width.
    assert_eq!((all.len(), &all[0].grad), (34, &support::recipes(&PLAIN).1));
    let ruled = Case { width: Width::Multiplier(100.0), layers_per_cell: 100, ..PLAIN };
    assert_eq!(support::tilings(&ruled, &support::model(&ruled)).len(), 34);
    let rounding = Case { layer_checkpoints: StoreRecipe { form: StoreForm::Int8, ..StoreRecipe::PLAIN }, ..PLAIN };
    assert_eq!(support::tilings(&rounding, &support::model(&rounding)).len(), 35);

    let growing = Case { policy: "dense", cache: &[16], storage: Storage::Growing, ..PLAIN };
    let all = support::tilings(&growing, &support::model(&growing));
    for &storage in Storage::ALL {
        assert!(all.iter().any(|t| t.kv_cache.storage == storage && t.kv_cache.cpu_offload), "{storage}");
    }
    // Nothing is ever overwritten.
    assert!(
        all.iter().all(|t| t.grad.undo_log == StoreRecipe::PLAIN)
            && all.iter().any(|t| t.grad.layer_checkpoints != StoreRecipe::PLAIN)
    );
    let quantised = Case { buffer: BufferKind::Int8, ..PLAIN };
    let all = support::tilings(&quantised, &support::model(&quantised));
    assert!(
        all.iter().all(|t| t.grad.undo_log.form == StoreForm::Plain)
            && all.iter().any(|t| t.grad.undo_log.place == StorePlace::File)
    );
    // One token is one chunk: nothing is crossed, and nothing waits but what enters the sequences.
    let short = Case { lengths: &[1], ..PLAIN };
    let shapes = |t: &Recipe| (t.grad.layers_per_cell, t.grad.chunks_per_cell);
    let all = support::tilings(&short, &support::model(&short));
    assert!(all[1..].iter().all(|t| shapes(t).1 == Some(1) && t.grad.undo_log == StoreRecipe::PLAIN), "{all:#?}");
}

#[test]
fn two_runs_in_f32_are_identical_to_the_bit() {
    for case in cases() {
        let case = Case { kind: Kind::Float, layers_per_cell: 2, ..case };
        let (model, batch) = (support::model(&case), support::batch(&case));
        assert_repeats(&gradients(&case, &model, &batch), &gradients(&case, &model, &batch), &case);
    }
}

/// So the micro-batches of a step add up to it, however they are cut.
#[test]
fn a_padded_batch_is_its_rows_alone() {
    let mut largest: f64 = 0.0;
    // In turn: each of the shapes meets a quarter of the cases. `batches_of_tokens_are_their_sequences_alone` has more of them for each case,
    // and `every_shape_of_batch` too.
    let shapes: [&[usize]; 4] = [&[44, 37, 9, 30], &[1, 44, 18, 28], &[23, 40], &[44, 31, 25]];
    for (case, lengths) in cases().into_iter().zip(shapes.into_iter().cycle()) {
        let case = Case { lengths, ..case };
        let model = support::model(&case);
        let together = gradients(&case, &model, &support::batch(&case));
        let mut sums: BTreeMap<String, Tensor> = BTreeMap::new();
        for (i, sequence) in together.losses.iter().enumerate() {
            let alone = gradients(&case, &model, &support::single(&case, i));
            let apart = (alone.losses[0].loss_sum - sequence.loss_sum).abs();
            assert!(apart <= EXACT * sequence.loss_sum, "{case:?}, sequence {i}");
            assert_eq!((alone.losses[0].targets, alone.losses[0].correct), (sequence.targets, sequence.correct));
            for (name, gradient) in alone.gradients {
                let sum = sums.remove(&name).map_or_else(|| gradient.copy(), |sum| sum + &gradient);
                sums.insert(name, sum);
            }
        }
        let error = worst(&together.gradients, &sums);
        assert!(error <= EXACT, "{case:?}: {error:.2e}");
        largest = largest.max(error);
    }
    println!("padding: worst difference {largest:.2e}");
}

/// The one policy whose sequences decide together, which is its definition: its sequences are not what they would be alone.
#[test]
fn the_published_h2o_couples_its_rows() {
    let case = Case { policy: "h2o-orig", lengths: &[44, 41], ..PLAIN };
    let model = support::model(&case);
    assert!(support::engine(&case, &model).settings().couples_sequences());
    let together = gradients(&case, &model, &support::batch(&case));
    let alone = gradients(&case, &model, &support::single(&case, 0));
    assert!((alone.losses[0].loss_sum - together.losses[0].loss_sum).abs() > 1e-6);
    let other = Case { policy: "h2o", ..case };
    assert!(!support::engine(&other, &model).settings().couples_sequences());
}

/// In f32 a batch is its sequences alone to this, or to a few times what f32 itself is away from f64.
const AS_ALONE_F32: f64 = 1e-6;
/// So many times: both are sums of roundings, and each draws its own.
const ROUNDINGS: f64 = 2.0;

/// Many short and few long, as an epoch has them where batches are cut by tokens. In f32 the libraries' products of other shapes sum in
/// another order, so that a sequence in company differs from itself alone as both differ from the exact one: by roundings, of which a
/// deep model makes more than 1e-6. A quantiser turns them into another step: in f32 the plain buffers are compared.
#[test]
fn batches_of_tokens_are_their_sequences_alone() {
    let in_f32 = |case: &&Case| case.buffer == BufferKind::Plain;
    let of = |kind| move |case: &Case| Case { kind, lengths: &[44, 9, 20, 31, 12, 3, 20, 7, 9, 1], ..*case };
    let cases = cases();
    let double = cases.iter().map(of(Kind::Double));
    // To save time, a third in f32; those whose policies have products of their own are among them.
    let has_products = |case: &Case| ["defensivekv", "expected-attention", "learned", "triattention"].contains(&case.policy);
    let of_f32 = cases.iter().filter(in_f32).enumerate().filter(|(at, case)| at % 3 == 0 || has_products(case));
    for case in double.chain(of_f32.map(|(_, case)| case).map(of(Kind::Float))) {
        let is_exact = case.kind == Kind::Double;
        let (model, whole) = (support::model(&case), support::batch(&case));
        let exact_case = Case { kind: Kind::Double, ..case };
        let exact_model = support::model(&exact_case);
        let batches = epoch_batches(case.lengths, BatchSize::Tokens(50), BatchOrder::Shuffled, 1, 0);
        assert!(batches.len() > 2 && batches.iter().any(|batch| batch.len() > 3), "{batches:?}");
        let (mut loss_error, mut loss_rounding): (f64, f64) = (0.0, 0.0);
        let (mut together, mut alone, mut exact) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let add = |sums: &mut BTreeMap<String, Tensor>, gradients: BTreeMap<String, Tensor>| {
            for (name, gradient) in gradients {
                let sum = sums.remove(&name).map_or_else(|| gradient.copy(), |sum| sum + &gradient);
                sums.insert(name, sum);
            }
        };
        for batch in batches {
            let sequences: Vec<_> = batch.iter().map(|&sample| whole.sequences[sample].clone()).collect();
            let found = gradients(&case, &model, &Batch { sequences: sequences.clone() });
            for (sequence, loss) in sequences.into_iter().zip(&found.losses) {
                let single = Batch { sequences: vec![sequence] };
                let own = gradients(&case, &model, &single);
                let apart = |found: f64| (own.losses[0].loss_sum - found).abs() / loss.loss_sum;
                loss_error = loss_error.max(apart(loss.loss_sum));
                if !is_exact {
                    // The same choices in f64: what f32 is away from that is its own.
                    let following = support::engine(&exact_case, &exact_model).following(own.log.clone());
                    let of_f64 =
                        following.gradients(&exact_model, &single, support::context(&exact_case), &mut NoObserver).unwrap();
                    loss_rounding = loss_rounding.max(apart(of_f64.losses[0].loss_sum));
                    add(&mut exact, of_f64.gradients);
                }
                add(&mut alone, own.gradients);
            }
            add(&mut together, found.gradients);
        }
        let error = worst(&together, &alone);
        if is_exact {
            assert!(error <= EXACT && loss_error <= EXACT, "{error:.2e}, losses {loss_error:.2e}: {case:?}");
            continue;
        }
        let rounding = worst(&alone, &exact);
        let most = |rounding: f64| AS_ALONE_F32.max(ROUNDINGS * rounding);
        let found = format!("{error:.2e} beside {rounding:.2e}, losses {loss_error:.2e} beside {loss_rounding:.2e}");
        assert!(error <= most(rounding) && loss_error <= most(loss_rounding), "{found}: {case:?}");
        if error.max(loss_error) > AS_ALONE_F32 {
            println!("batches of tokens in f32, and f32 from f64: {}: {found}", case.policy);
        }
    }
}

/// What is run is what the plan counts: real tokens, and for each sequence that ends early less than a chunk of pads.
#[test]
fn sequences_that_have_ended_are_not_run() {
    for case in registered_policies() {
        let case = Case { lengths: &[50, 31, 9], ..case };
        let (model, batch) = (support::model(&case), support::batch(&case));
        let (engine, mut run) = (support::engine(&case, &model), 0);
        engine.inspect(&model, &batch, None, &mut |_, hidden| run += hidden.size()[0] * hidden.size()[1]).unwrap();
        let plan = engine.settings().plan(&batch, None).unwrap();
        assert_eq!(run as usize, plan.num_tokens_run(), "{case:?}");
        assert!((run as usize) < batch.num_tokens() + 2 * plan.longest_chunk(), "{run} tokens: {case:?}");
    }
}
