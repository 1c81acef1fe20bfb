//! The crown, over shapes: lengths, caches, chunks and cells that fit each other badly.

use kvtune::engine::NoObserver;
use kvtune::verify::Reference;
use proptest::prelude::*;

use crate::support;
use crate::support::case::{Case, EXACT, PLAIN, Width, prove, run};

const LASTREC: Case = Case { policy: "lastrec", params: "init_grace_tokens = 3", ..PLAIN };
const H2O: Case = Case { params: "grace_period = 2", ..PLAIN };
const EVICTING: [Case; 2] = [LASTREC, H2O];

fn varied<const N: usize>(variations: [fn(Case) -> Case; N]) -> Vec<Case> {
    EVICTING.iter().flat_map(|&case| variations.iter().map(move |vary| vary(case))).collect()
}

#[test]
fn every_shape_of_cell() {
    let mut cases = Vec::new();
    for case in EVICTING {
        for layers_per_cell in [1, 2, 3] {
            for width in [Width::Chunks(1), Width::Chunks(2), Width::Chunks(100), Width::Multiplier(1.0)] {
                cases.push(Case { name: "cells", layers_per_cell, width, ..case });
            }
        }
        cases.push(Case { name: "narrow cells", width: Width::Multiplier(0.5), ..case });
        cases.push(Case { name: "wide cells", layers_per_cell: 2, width: Width::Multiplier(2.0), ..case });
        cases.push(Case { name: "more layers a cell than there are", layers_per_cell: 100, ..case });
    }
    prove("cells", &cases);
}

#[test]
fn every_size_of_chunk() {
    let cases = varied([
        |c| Case { name: "one token", chunk: 1, lengths: &[29, 20], ..c },
        |c| Case {
            name: "one token, many a cell",
            chunk: 1,
            lengths: &[29, 20],
            layers_per_cell: 3,
            width: Width::Chunks(100),
            ..c
        },
        |c| Case { name: "a prime", chunk: 7, ..c },
        |c| Case { name: "a larger prime", chunk: 11, layers_per_cell: 2, width: Width::Chunks(2), ..c },
        |c| Case { name: "as many as the evictions that fit", chunk: 6, lengths: &[42, 36], ..c },
    ]);
    prove("chunks", &cases);
    let largest = [
        Case { name: "all but the sinks", chunk: 15, ..LASTREC },
        Case { name: "the whole cache", params: "init_grace_tokens = 0", chunk: 18, ..LASTREC },
        Case { name: "all but the youngest", chunk: 16, ..H2O },
        Case { name: "the whole cache of h2o", params: "", chunk: 18, ..H2O },
        Case {
            name: "the whole cache of h2o, two chunks a cell",
            params: "",
            chunk: 18,
            lengths: &[50, 47, 40],
            width: Width::Chunks(2),
            ..H2O
        },
    ];
    prove("largest chunks", &largest);
}

#[test]
fn every_length_beside_the_cache() {
    let cases = varied([
        |c| Case { name: "T = C", lengths: &[18, 18], ..c },
        |c| Case { name: "T = C, ragged", lengths: &[18, 7], ..c },
        |c| Case { name: "T = C + 1", lengths: &[19, 19], ..c },
        |c| Case { name: "T = C + 1, ragged", lengths: &[19, 6], ..c },
        |c| Case { name: "T < C", lengths: &[13, 11], ..c },
        |c| Case { name: "T < n", lengths: &[4, 3], ..c },
        // A query that sees one key gives it the weight 1: q and k, two matrices a layer each, have no gradient.
        |c| Case { name: "T = 1", lengths: &[1], untested: 4 * support::NUM_LAYERS, ..c },
        |c| Case { name: "T - C a multiple of n", lengths: &[38, 33], ..c },
        |c| Case { name: "T - C one more than a multiple of n", lengths: &[39, 34], ..c },
        |c| Case { name: "T - C one less than a multiple of n", lengths: &[37, 32], ..c },
    ]);
    prove("lengths", &cases);
}

#[test]
fn every_layer_with_a_length_of_its_own() {
    let cases = varied([
        |c| Case { name: "unaligned", cache: &[11, 18, 14], ..c },
        |c| Case { name: "unaligned, two layers a cell", cache: &[18, 11, 14], layers_per_cell: 2, width: Width::Chunks(2), ..c },
        |c| Case { name: "unaligned, one cell", cache: &[14, 11, 18], layers_per_cell: 3, width: Width::Chunks(100), ..c },
        |c| Case { name: "unaligned, by the multiplier", cache: &[11, 18, 14], width: Width::Multiplier(1.0), ..c },
        |c| Case { name: "one layer keeps all", cache: &[11, 60, 14], ..c },
        |c| Case { name: "the longest sequence fits some caches only", cache: &[11, 18, 14], lengths: &[16, 12, 8], ..c },
    ]);
    prove("lengths by layer", &cases);
}

/// A cache that holds the whole sequence: plain full attention, whatever the chunks and cells.
#[test]
fn a_cache_that_holds_all_is_full_attention() {
    let mut worst: f64 = 0.0;
    for (policy, params) in [("dense", ""), ("lastrec", "init_grace_tokens = 3"), ("h2o", "grace_period = 2")] {
        let case = Case { policy, params, lengths: &[33, 20], cache: &[33], ..PLAIN };
        let (model, batch, context) = (support::model(&case), support::batch(&case), support::context(&case));
        let log = support::full_attention(&batch);
        let reference = Reference::new(&support::engine(&case, &model), &model, &batch, &log, context).unwrap();
        for (cache, chunk, layers_per_cell, width) in [
            (33, 1, 3, Width::Chunks(100)),
            (33, 7, 1, Width::Chunks(2)),
            (40, 13, 2, Width::Chunks(1)),
            (60, 30, 1, Width::Multiplier(1.0)),
        ] {
            let cache: &'static [usize] = Box::leak(Box::new([cache]));
            let engine = support::engine(&Case { cache, chunk, layers_per_cell, width, ..case }, &model);
            let ours = engine.gradients(&model, &batch, context, &mut NoObserver).unwrap();
            let found = reference.compare(&ours);
            assert!(found.worst() <= EXACT && found.untested().is_empty(), "{policy}, chunk {chunk}: {found:#?}");
            worst = worst.max(found.worst());
        }
    }
    println!("full attention: worst error {worst:.2e}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// What nobody thought of.
    #[test]
    fn shapes_at_random(
        policy in prop::sample::select(vec![("lastrec", "init_grace_tokens = 2"), ("h2o", ""), ("h2o", "grace_period = 3")]),
        lengths in prop::collection::vec(1usize..50, 1..4),
        cache in prop::collection::vec(8usize..40, 3),
        (chunk, layers_per_cell, chunks_per_cell) in (1usize..=5, 1usize..=3, 1usize..=6),
        heads in prop::sample::select(vec![(4, 4), (6, 2), (4, 1)]),
    ) {
        let (lengths, cache): (&'static [usize], &'static [usize]) = (lengths.leak(), cache.leak());
        let width = Width::Chunks(chunks_per_cell);
        let (policy, params) = policy;
        let case = Case { name: "random", policy, params, lengths, cache, chunk, layers_per_cell, width, heads, ..PLAIN };
        let found = run(&case);
        // A sequence of one token tests no query and no key: a softmax over one score is constant.
        prop_assert!(found.worst() <= EXACT, "{:?}: worst error {:.2e}", case, found.worst());
    }
}
