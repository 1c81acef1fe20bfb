//! The crown, over chunks that are not all of one size: bent, drawn, of single tokens, and caches that narrow towards the top.

use kvtune::model::Model;
use kvtune::recipe::{CacheLength, Chunking, Pyramid};

use super::families::{MIXTRAL, of_family};
use crate::support;
use crate::support::case::{Case, HeadKind, PLAIN, Tail, TargetsAt, Width, prove};

const LASTREC: Case = Case { policy: "lastrec", params: "init_grace_tokens = 3", ..PLAIN };
const H2O: Case = Case { params: "grace_period = 2\nnormalize_scores = true", ..PLAIN };
const EVICTING: [Case; 2] = [LASTREC, H2O];

fn varied<const N: usize>(variations: [fn(Case) -> Case; N]) -> Vec<Case> {
    EVICTING.iter().flat_map(|&case| variations.iter().map(move |vary| vary(case))).collect()
}

/// Lengths of the chunks of a case, pieces of the prefill span as they are.
fn sizes(case: &Case, model: &Model) -> Vec<usize> {
    let plan = support::engine(case, model).settings().plan(&support::batch(case), support::context(case).chunk_sizes);
    plan.unwrap().spans.iter().map(|span| span.len).collect()
}

#[test]
fn chunks_bent_to_where_caches_become_full() {
    let cases = varied([
        |c| Case { name: "bent", chunking: Chunking::Reference, cache: &[11, 18, 14], ..c },
        |c| Case { name: "longer than the others", chunking: Chunking::Reference, cache: &[12, 29, 20], ..c },
        |c| Case {
            name: "longer, in one cell",
            chunking: Chunking::Reference,
            cache: &[29, 12, 20],
            layers_per_cell: 3,
            width: Width::Chunks(100),
            ..c
        },
        |c| Case { name: "of one length, so not bent", chunking: Chunking::Reference, ..c },
        |c| Case { name: "the longest cache beyond the sequences", chunking: Chunking::Reference, cache: &[11, 60, 14], ..c },
    ]);
    let model = support::model(&PLAIN);
    assert_eq!(sizes(&cases[0], &model), [5, 5, 1, 3, 4, 5, 5, 5, 5, 5, 1]);
    assert_eq!(sizes(&cases[1], &model), [5, 5, 2, 8, 9, 5, 5, 5], "5 to 9 tokens");
    prove("bent", &cases);
}

#[test]
fn chunks_of_drawn_sizes() {
    let cases = varied([
        |c| Case { name: "drawn", is_randomized: true, ..c },
        |c| Case { name: "drawn, in one cell", is_randomized: true, layers_per_cell: 3, width: Width::Chunks(100), ..c },
        |c| Case { name: "drawn, by the multiplier", is_randomized: true, chunk: 8, width: Width::Multiplier(1.0), ..c },
        |c| Case { name: "drawn and bent", is_randomized: true, chunking: Chunking::Reference, cache: &[16, 31, 23], ..c },
        |c| Case { name: "drawn around one", is_randomized: true, chunk: 1, lengths: &[29, 20], ..c },
        |c| Case { name: "drawn, with dropout", is_randomized: true, dropout: 0.1, ..c },
        |c| Case { name: "drawn, classification", is_randomized: true, head: HeadKind::Classify, ..c },
    ]);
    let model = support::model(&PLAIN);
    assert_ne!(sizes(&cases[0], &model), sizes(&Case { is_randomized: false, ..cases[0] }, &model));
    prove("drawn", &cases);
}

#[test]
fn single_tokens_for_targets() {
    let cases = varied([
        |c| Case { name: "singles", tail: Tail::OneByOne, targets: TargetsAt::Last(6), ..c },
        |c| Case { name: "singles of one sequence", tail: Tail::OneByOne, targets: TargetsAt::Last(9), lengths: &[40], ..c },
        |c| Case {
            name: "singles from within the prefill span",
            tail: Tail::OneByOne,
            targets: TargetsAt::Last(20),
            lengths: &[30, 29],
            width: Width::Chunks(7),
            ..c
        },
        |c| Case { name: "singles from the first token on", tail: Tail::OneByOne, lengths: &[24, 11], ..c },
        |c| Case {
            name: "singles, bent",
            tail: Tail::OneByOne,
            targets: TargetsAt::Last(6),
            lengths: &[44, 41],
            chunking: Chunking::Reference,
            cache: &[11, 18, 14],
            ..c
        },
        |c| Case {
            name: "singles, drawn",
            tail: Tail::OneByOne,
            targets: TargetsAt::Last(6),
            lengths: &[44, 41],
            is_randomized: true,
            ..c
        },
        |c| Case {
            name: "singles in one cell",
            tail: Tail::OneByOne,
            targets: TargetsAt::Last(12),
            lengths: &[33],
            layers_per_cell: 3,
            width: Width::Chunks(100),
            ..c
        },
    ]);
    let model = support::model(&PLAIN);
    assert_eq!(sizes(&cases[1], &model), [&[5, 5, 5, 3, 5, 5, 3][..], &[1; 9]].concat());
    assert_eq!(sizes(&cases[2], &model), [&[5, 4][..], &[1; 21]].concat());
    assert_eq!(sizes(&cases[3], &model), [1; 24]);
    prove("singles", &cases);
    let dense =
        Case { policy: "dense", cache: &[50], tail: Tail::OneByOne, targets: TargetsAt::Last(6), lengths: &[44, 41], ..PLAIN };
    prove("singles, dense", &[dense]);
}

#[test]
fn blocks_of_decoding() {
    let cases = varied([
        |c| Case { name: "blocks", tail: Tail::InBlocks(4), targets: TargetsAt::Last(6), ..c },
        |c| Case { name: "blocks of one sequence", tail: Tail::InBlocks(3), targets: TargetsAt::Last(10), lengths: &[40], ..c },
        |c| Case {
            name: "blocks from within the prefill span, in one cell",
            tail: Tail::InBlocks(5),
            targets: TargetsAt::Last(20),
            lengths: &[30, 29],
            layers_per_cell: 3,
            width: Width::Chunks(100),
            ..c
        },
        |c| Case {
            name: "blocks, narrowing caches",
            tail: Tail::InBlocks(4),
            targets: TargetsAt::Last(9),
            lengths: &[44, 41],
            cache: &[18, 14, 11],
            ..c
        },
    ]);
    let model = support::model(&PLAIN);
    assert_eq!(sizes(&cases[1], &model), [5, 5, 5, 3, 5, 5, 2, 3, 3, 3, 3], "the last block has two pads");
    prove("blocks", &cases);
    prove("blocks, experts", &[of_family(("experts in blocks", MIXTRAL), &cases[1])]);
    let blocks = Case { tail: Tail::InBlocks(4), targets: TargetsAt::Last(6), lengths: &[44, 41], ..PLAIN };
    prove(
        "blocks, budgets and windows",
        &[
            Case { policy: "adakv", params: "floor = 0.5\npolicy.snapkv = { window_size = 2 }", ..blocks },
            Case { window: 7, sliding_layers: &[0, 2], ..blocks },
            Case { policy: "dense", cache: &[50], ..blocks },
        ],
    );
}

#[test]
fn caches_that_narrow_towards_the_top() {
    let lengths = CacheLength::Pyramid(Pyramid { mean: 16, top: 11 }).by_layer(support::NUM_LAYERS);
    assert_eq!(lengths, [21, 16, 11]);
    let lengths: &'static [usize] = lengths.leak();
    let cases: Vec<Case> = EVICTING
        .iter()
        .flat_map(|&case| {
            [
                Case { name: "pyramid", cache: lengths, ..case },
                Case { name: "pyramid, bent", cache: lengths, chunking: Chunking::Reference, layers_per_cell: 2, ..case },
            ]
        })
        .collect();
    prove("pyramid", &cases);
}
