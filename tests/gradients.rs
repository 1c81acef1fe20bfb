//! The crown: gradients of the tiled engine equal plain autograd through masked dense attention, for every policy and head.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on fails, and says what it saw")]

mod support;

use kvtune::recipe::Storage;
use support::case::{Case, HeadKind, PLAIN, TargetsAt, Width, prove, run};
use tch::Kind;

/// Every policy, each with the parameters that change what it does.
const POLICIES: &[Case] = &[
    Case { name: "dense", policy: "dense", cache: &[50], ..PLAIN },
    Case { name: "dense, growing", policy: "dense", cache: &[16], storage: Storage::Growing, ..PLAIN },
    Case { name: "lastrec", policy: "lastrec", ..PLAIN },
    Case { name: "lastrec without sinks", policy: "lastrec", params: "init_grace_tokens = 0", ..PLAIN },
    Case { name: "lastrec with sinks", policy: "lastrec", params: "init_grace_tokens = 4", ..PLAIN },
    Case { name: "h2o", policy: "h2o", ..PLAIN },
    Case { name: "h2o without first tokens", params: "keep_initial_fraction = 0.0", ..PLAIN },
    Case { name: "h2o with first tokens", params: "keep_initial_fraction = 0.4", ..PLAIN },
    Case { name: "h2o, grace 1", params: "grace_period = 1", ..PLAIN },
    Case { name: "h2o, grace 4", params: "grace_period = 4", ..PLAIN },
    Case { name: "h2o, grace 12", params: "grace_period = 12", ..PLAIN },
    Case { name: "h2o, normalised", params: "normalize_scores = true", ..PLAIN },
    Case { name: "h2o, normalised as the reference counts", params: "normalize_scores = true\nreference_counts = true", ..PLAIN },
];

/// Three that behave differently: nothing leaves, one choice for all heads, a choice per head.
const KINDS: [Case; 3] = [POLICIES[0], POLICIES[4], POLICIES[9]];

fn varied<const N: usize>(variations: [fn(Case) -> Case; N]) -> Vec<Case> {
    KINDS.iter().flat_map(|&case| variations.iter().map(move |vary| vary(case))).collect()
}

#[test]
fn every_policy() {
    prove("policies", POLICIES);
}

#[test]
fn every_ratio_of_query_heads_to_kv_heads() {
    let cases = varied([
        |c| Case { name: "one to one", heads: (4, 4), ..c },
        |c| Case { name: "two to one", heads: (4, 2), ..c },
        |c| Case { name: "one KV head", heads: (4, 1), ..c },
    ]);
    prove("GQA", &cases);
}

#[test]
fn every_shape_of_batch() {
    let cases = varied([
        |c| Case { name: "a single row", lengths: &[44], ..c },
        |c| Case { name: "rows of one length", lengths: &[41, 41], ..c },
        |c| Case { name: "a row shorter than the cache", lengths: &[44, 11], ..c },
        |c| Case { name: "a row of one token", lengths: &[1, 44], ..c },
        |c| Case { name: "a row that ends at a chunk's border", lengths: &[23, 44, 28], ..c },
        |c| Case { name: "a row that ends with the prefill span", lengths: &[18, 44], ..c },
        |c| Case { name: "a row that ends one token after the prefill span", lengths: &[19, 44], ..c },
        |c| Case { name: "nearly equal rows", lengths: &[44, 43, 42], ..c },
    ]);
    prove("batches", &cases);
}

#[test]
fn every_head() {
    let cases = varied([
        |c| Case { name: "classification", head: HeadKind::Classify, ..c },
        |c| Case {
            name: "classification in one cell",
            head: HeadKind::Classify,
            layers_per_cell: 3,
            width: Width::Chunks(100),
            ..c
        },
        |c| Case { name: "classification of single rows", head: HeadKind::Classify, lengths: &[44], ..c },
    ]);
    prove("heads", &cases);
}

#[test]
fn targets_anywhere() {
    let cases = varied([
        |c| Case { name: "in the first chunk only", targets: TargetsAt::First(5), ..c },
        |c| Case { name: "in the prefill span only", targets: TargetsAt::First(17), width: Width::Chunks(1), ..c },
        |c| Case { name: "at the end only", targets: TargetsAt::Last(3), ..c },
        |c| Case { name: "in the last chunk only", lengths: &[44, 44], targets: TargetsAt::Last(1), ..c },
        |c| Case { name: "a single one in the middle", targets: TargetsAt::Only(20), ..c },
        |c| Case { name: "a single one at a chunk's first column", targets: TargetsAt::Only(23), width: Width::Chunks(2), ..c },
        |c| Case {
            name: "a single one at the end, in one cell",
            targets: TargetsAt::Only(43),
            layers_per_cell: 3,
            width: Width::Chunks(100),
            ..c
        },
    ]);
    prove("targets", &cases);
}

#[test]
fn adapters_on_some_layers() {
    let cases = varied([
        |c| Case { name: "the MLP", lora: &["gate_proj", "up_proj", "down_proj"], ..c },
        |c| Case {
            name: "the MLP, in one cell",
            lora: &["gate_proj", "up_proj", "down_proj"],
            layers_per_cell: 3,
            width: Width::Chunks(100),
            ..c
        },
        |c| Case { name: "o_proj", lora: &["o_proj"], ..c },
        |c| Case { name: "o_proj, two layers a cell", lora: &["o_proj"], layers_per_cell: 2, ..c },
        |c| Case { name: "v_proj", lora: &["v_proj"], ..c },
        |c| Case { name: "v_proj, one chunk a cell", lora: &["v_proj"], width: Width::Chunks(1), ..c },
        |c| Case { name: "q_proj", lora: &["q_proj"], ..c },
        |c| Case { name: "k_proj", lora: &["k_proj"], ..c },
    ]);
    prove("adapters", &cases);
}

#[test]
fn dropout() {
    let cases = varied([
        |c| Case { name: "dropout", dropout: 0.1, ..c },
        |c| Case { name: "dropout, in one cell", dropout: 0.1, layers_per_cell: 3, width: Width::Chunks(100), ..c },
        |c| Case { name: "dropout, two layers a cell", dropout: 0.5, layers_per_cell: 2, width: Width::Chunks(1), ..c },
        |c| Case { name: "dropout, on the MLP", dropout: 0.1, lora: &["up_proj", "down_proj"], ..c },
        |c| Case { name: "dropout, classification", dropout: 0.1, head: HeadKind::Classify, ..c },
    ]);
    prove("dropout", &cases);
    let [without, with] = [0.0, 0.1].map(|dropout| run(&Case { dropout, ..PLAIN }).loss);
    assert!((without - with).abs() > 1e-4, "{without} with and without dropout");
}

#[test]
fn single_precision() {
    let cases = varied([|c| Case { name: "f32", kind: Kind::Float, ..c }]);
    prove("f32", &cases);
}
