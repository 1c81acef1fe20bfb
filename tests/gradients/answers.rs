//! Columns without targets: nothing follows the uppermost layer's attention there, and the gradient stays exact.

use kvtune::recipe::AttentionOutputs;

use super::families::{FAMILIES, of_family};
use super::kept::assert_same;
use super::{KINDS, whole};
use crate::support::case::{Beside, Case, HeadKind, PLAIN, TargetsAt, Trains, Width, prove};

/// At the end, at the beginning, and in the middle.
const TARGETS: [TargetsAt; 3] = [TargetsAt::Last(3), TargetsAt::First(5), TargetsAt::Only(20)];

const ANSWER: Case = Case { targets: TARGETS[0], width: Width::Chunks(1), ..PLAIN };

#[test]
fn every_shape_of_cell() {
    let mut cases = Vec::new();
    for targets in TARGETS {
        for layers_per_cell in [1, 2, 3] {
            for width in [Width::Chunks(1), Width::Chunks(2)] {
                cases.push(Case { layers_per_cell, width, targets, ..PLAIN });
            }
        }
    }
    prove("answers, cells", &cases);
}

#[test]
fn every_kind_of_cache_and_every_family() {
    let caches = KINDS.map(|case| Case { targets: ANSWER.targets, width: ANSWER.width, ..case });
    prove("answers, caches", &caches);
    // So many that every expert has tokens.
    let longer = Case { targets: TargetsAt::Last(8), ..ANSWER };
    let of = |(at, family): (usize, _)| of_family(family, &if at % 2 == 0 { longer } else { whole(&longer) });
    prove("answers, families", &FAMILIES.into_iter().enumerate().map(of).collect::<Vec<_>>());
}

#[test]
fn whatever_is_trained() {
    let cases = [
        Case { lora: &["layers.2.mlp.down_proj"], ..ANSWER },
        Case { lora: &["layers.2.self_attn.o_proj"], ..whole(&ANSWER) },
        Case { saved: &["embed_tokens", "lm_head", "model.norm"], ..ANSWER },
        Case { trains: Trains::AllTied, ..ANSWER },
        Case { trains: Trains::All, is_offloaded: true, ..whole(&ANSWER) },
        Case { beside: Beside::Magnitudes, dropout: 0.2, ..ANSWER },
        Case { head: HeadKind::Distilled, ..ANSWER },
    ];
    prove("answers, trained parts", &cases);
}

#[test]
fn what_the_forward_phase_keeps_changes_no_bit() {
    for case in [ANSWER, Case { layers_per_cell: 2, ..ANSWER }, Case { targets: TARGETS[1], ..whole(&ANSWER) }] {
        for kept in [1, 5, 1000] {
            assert_same(&case, &Case { kept, ..case });
        }
        assert_same(&case, &Case { outputs: AttentionOutputs::Keep, ..case });
    }
}
