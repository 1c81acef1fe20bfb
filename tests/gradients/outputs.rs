//! Attention's outputs that wait for the cells: the gradient is that of cells that attend again, to the bit.

use kvtune::recipe::{AttentionOutputs, Storage};
use tch::Kind;

use super::families::{FAMILIES, of_family};
use super::kept::assert_same;
use super::{KINDS, whole};
use crate::support::case::{Case, PLAIN, Tail, TargetsAt, Trains, Width, prove};
use crate::support::grid::each_policy;

fn check_bits(cases: impl IntoIterator<Item = Case>) {
    for case in cases {
        assert_same(&case, &Case { outputs: AttentionOutputs::Keep, ..case });
    }
}

/// With every buffer, head and tiling in turn, graphs that are kept among them.
#[test]
fn every_policy_to_the_bit() {
    check_bits(each_policy().into_iter().filter(|case| case.kept < 1000));
}

#[test]
fn every_family_to_the_bit() {
    let cases = FAMILIES.into_iter().enumerate();
    check_bits(cases.map(|(at, family)| of_family(family, &Case { layers_per_cell: 1 + at % 3, ..PLAIN })));
}

#[test]
fn what_else_a_cell_depends_on_to_the_bit() {
    check_bits([
        Case { dropout: 0.2, is_randomized: true, window: 7, sliding_layers: &[0, 2], ..PLAIN },
        Case { tail: Tail::OneByOne, targets: TargetsAt::Last(3), ..PLAIN },
        Case { lora: &["up_proj", "down_proj"], ..whole(&PLAIN) },
        Case { trains: Trains::AllTied, lora: &[], layers_per_cell: 2, kept: 2, ..PLAIN },
        Case { trains: Trains::All, lora: &[], kind: Kind::BFloat16, ..PLAIN },
        Case { kind: Kind::Float, layers_per_cell: 2, width: Width::Chunks(1), ..PLAIN },
        Case { policy: "dense", storage: Storage::Paged, cache: &[16], layers_per_cell: 2, width: Width::Chunks(1), ..PLAIN },
    ]);
}

#[test]
fn kept_outputs_are_exact() {
    let cases = [KINDS, KINDS.map(|case| whole(&case))].concat();
    prove("kept outputs", &cases.into_iter().map(|case| Case { outputs: AttentionOutputs::Keep, ..case }).collect::<Vec<_>>());
}
