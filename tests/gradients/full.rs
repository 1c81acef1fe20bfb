//! The crown, with all weights trained: embedding, norms, projections, biases and output matrix, tied or not.

use std::collections::BTreeMap;

use kvtune::engine::{MicroBatchContext, NoObserver};
use kvtune::recipe::{LossMean, Storage};
use tch::{Kind, Tensor};

use crate::support;
use crate::support::case::{Case, EXACT, HeadKind, PLAIN, TargetsAt, Trains, Width, compare, prove};

const FULL: Case = Case { trains: Trains::All, lora: &[], ..PLAIN };
const TIED: Case = Case { trains: Trains::AllTied, ..FULL };
const ONE_CELL: Case = Case { layers_per_cell: 3, width: Width::Chunks(100), ..FULL };

/// Three that behave differently: nothing leaves, one choice for all heads, a choice per head.
const POLICIES: [Case; 3] = [
    Case { policy: "dense", cache: &[50], ..FULL },
    Case { policy: "lastrec", params: "init_grace_tokens = 3", ..FULL },
    Case { params: "grace_period = 2", ..FULL },
];

fn varied<const N: usize>(variations: [fn(Case) -> Case; N]) -> Vec<Case> {
    POLICIES.iter().flat_map(|&case| variations.iter().map(move |vary| vary(case))).collect()
}

#[test]
fn tied_and_untied_under_both_heads() {
    let cases = varied([
        |c| Case { name: "untied", ..c },
        |c| Case { name: "tied", trains: Trains::AllTied, ..c },
        |c| Case { name: "untied classification", head: HeadKind::Classify, ..c },
        |c| Case { name: "tied classification", head: HeadKind::Classify, trains: Trains::AllTied, ..c },
    ]);
    prove("all weights, ends and heads", &cases);
    let classifier = r#"{"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 4}"#;
    let scored = Case { name: "classes", head: HeadKind::Score, config: classifier, ..FULL };
    prove("all weights of a classifier", &[scored, Case { layers_per_cell: 3, ..scored }]);
}

#[test]
fn every_shape_of_cell() {
    let mut cases = Vec::new();
    for case in varied([|c| c, |c| Case { trains: Trains::AllTied, ..c }]) {
        for layers_per_cell in [1, 2, 3] {
            for width in [Width::Chunks(1), Width::Chunks(2), Width::Chunks(100)] {
                cases.push(Case { name: "cells", layers_per_cell, width, ..case });
            }
        }
    }
    prove("all weights, cells", &cases);
}

#[test]
fn batches_targets_and_storage() {
    let cases = varied([
        |c| Case { name: "a single sequence", lengths: &[44], ..c },
        |c| Case { name: "a sequence shorter than the cache", lengths: &[44, 11], trains: Trains::AllTied, ..c },
        |c| Case { name: "a sequence of one token", lengths: &[1, 44], ..c },
        |c| Case { name: "one KV head", heads: (4, 1), trains: Trains::AllTied, ..c },
        |c| Case { name: "in the first chunk only", targets: TargetsAt::First(5), trains: Trains::AllTied, ..c },
        |c| Case { name: "at the end only", targets: TargetsAt::Last(3), ..c },
        |c| Case { name: "a single one in the middle", targets: TargetsAt::Only(20), trains: Trains::AllTied, ..c },
    ]);
    prove("all weights, batches", &cases);
    let growing = Case { policy: "dense", cache: &[16], storage: Storage::Growing, ..TIED };
    let by_layer = Case { cache: &[11, 18, 14], layers_per_cell: 2, width: Width::Chunks(2), ..FULL };
    prove("all weights, caches", &[growing, by_layer]);
}

#[test]
fn single_precision() {
    let cases = varied([|c| Case { kind: Kind::Float, ..c }, |c| Case { kind: Kind::Float, trains: Trains::AllTied, ..c }]);
    prove("all weights, f32", &cases);
}

/// Each weight of the file has a gradient, under its own name; a tied matrix has one.
#[test]
fn by_the_names_of_the_file() {
    for (case, num_ends) in [(FULL, 3), (TIED, 2)] {
        let (model, batch, context) = (support::model(&case), support::batch(&case), support::context(&case));
        let step = support::engine(&case, &model).gradients(&model, &batch, context, &mut NoObserver).unwrap();
        assert_eq!(step.gradients.len(), num_ends + 12 * support::NUM_LAYERS);
        for (name, parameter) in model.parameters() {
            assert_eq!(step.gradients[&name].size(), parameter.size(), "{name}");
            assert!(!parameter.grad().defined() || parameter.grad().count_nonzero(None).int64_value(&[]) == 0, "{name}");
        }
        assert_eq!(step.gradients.contains_key("lm_head.weight"), case.trains != Trains::AllTied);
    }
}

/// A forward phase whose backward never runs, as before an error, leaves nothing behind for the next step.
#[test]
fn an_abandoned_step_is_forgotten() {
    let case = Case { trains: Trains::AllTied, ..ONE_CELL };
    let (model, batch, context) = (support::model(&case), support::batch(&case), support::context(&case));
    let engine = support::engine(&case, &model);
    let clean = engine.gradients(&model, &batch, context, &mut NoObserver).unwrap();
    drop(engine.forward(&model, &batch, context, &mut NoObserver).unwrap());
    let again = engine.gradients(&model, &batch, context, &mut NoObserver).unwrap();
    assert!(clean.gradients.iter().all(|(name, gradient)| *gradient == again.gradients[name]));
}

/// Each sequence counts by the mean of its own targets: what the sequences come to one by one.
#[test]
fn the_mean_over_sequences() {
    let cases = [ONE_CELL, Case { trains: Trains::AllTied, ..ONE_CELL }, Case { head: HeadKind::Distilled, ..FULL }];
    for case in cases {
        let (model, batch) = (support::model(&case), support::batch(&case));
        let engine = support::engine(&case, &model);
        let count = batch.sequences.len();
        let context = MicroBatchContext { weight: 1.0 / count as f64, loss_mean: LossMean::Sequences, ..support::context(&case) };
        let found = compare(&engine, &model, &batch, context).unwrap();
        assert!(found.worst() < EXACT, "{case:?}: {found:?}");
        let ours = engine.gradients(&model, &batch, context, &mut NoObserver).unwrap().gradients;
        let mut apart: BTreeMap<String, Tensor> = BTreeMap::new();
        for sequence in 0..count {
            let single = support::single(&case, sequence);
            let weight = context.weight / single.num_targets() as f64;
            let context = MicroBatchContext { weight, ..support::context(&case) };
            for (name, gradient) in engine.gradients(&model, &single, context, &mut NoObserver).unwrap().gradients {
                let sum = apart.remove(&name).map_or_else(|| gradient.copy(), |sum| sum + &gradient);
                apart.insert(name, sum);
            }
        }
        for (name, gradient) in &ours {
            let error = (gradient - &apart[name]).norm().double_value(&[]) / apart[name].norm().double_value(&[]).max(1e-30);
            assert!(error < EXACT, "{case:?}, {name}: {error:.1e}");
        }
    }
}
