//! Graphs that the forward phase keeps: the gradient is that of cells which are computed again, to the bit, whatever is kept.

use kvtune::engine::{Event, MemoryByPart, MicroBatchGradients, NoObserver, Observer};
use kvtune::recipe::Storage;
use tch::Kind;

use super::families::{FAMILIES, of_family};
use super::{KINDS, whole};
use crate::support;
use crate::support::case::{Beside, Case, INT8, PLAIN, Tail, TargetsAt, Trains, Width, prove};
use crate::support::grid::{ACROSS_LAYERS, each_policy};

/// A cell, a band of `PLAIN` and more, everything.
const SOME_AND_ALL: [usize; 3] = [1, 5, 1000];

fn gradients(case: &Case, observer: &mut dyn Observer) -> MicroBatchGradients {
    let (model, batch) = (support::model(case), support::batch(case));
    support::engine(case, &model).gradients(&model, &batch, support::context(case), observer).unwrap()
}

/// Of each case one number of cells, in turn.
fn check_bits(cases: &[Case]) {
    for (at, case) in cases.iter().enumerate() {
        assert_same(&Case { kept: 0, ..*case }, &Case { kept: SOME_AND_ALL[at % 3], ..*case });
    }
}

/// Two ways of running a case that differ in no bit.
pub(super) fn assert_same(one: &Case, other: &Case) {
    let [none, found] = [one, other].map(|case| gradients(case, &mut NoObserver));
    assert_eq!(found.log.hash(), none.log.hash(), "{other:?}");
    assert_eq!(found.router_loss, none.router_loss, "{other:?}");
    for (a, b) in found.losses.iter().zip(&none.losses) {
        assert!(a.loss_sum.to_bits() == b.loss_sum.to_bits() && a.correct == b.correct, "{other:?}");
    }
    assert!(found.gradients.keys().eq(none.gradients.keys()) && !none.gradients.is_empty());
    for (name, gradient) in &none.gradients {
        assert!(gradient.equal(&found.gradients[name]), "{name}: {other:?}");
    }
}

#[test]
fn every_policy_to_the_bit() {
    check_bits(&each_policy());
}

#[test]
fn every_family_to_the_bit() {
    let cases = FAMILIES.into_iter().enumerate();
    let of = |(at, family)| of_family(family, &if at % 2 == 0 { PLAIN } else { whole(&PLAIN) });
    check_bits(&cases.map(of).collect::<Vec<_>>());
}

#[test]
fn what_else_a_cell_depends_on_to_the_bit() {
    let cases = [
        Case { dropout: 0.2, ..PLAIN },
        Case { dropout: 0.2, beside: Beside::Magnitudes, ..whole(&PLAIN) },
        Case { is_randomized: true, window: 7, sliding_layers: &[0, 2], ..PLAIN },
        Case { tail: Tail::OneByOne, targets: TargetsAt::Last(3), ..PLAIN },
        ACROSS_LAYERS,
        Case { lora: &["up_proj", "down_proj"], ..whole(&PLAIN) },
        Case { trains: Trains::AllTied, lora: &[], layers_per_cell: 2, ..PLAIN },
        Case { trains: Trains::All, lora: &[], kind: Kind::BFloat16, ..PLAIN },
        Case { saved: &["embed_tokens", "lm_head"], kind: Kind::Float, ..PLAIN },
        Case { policy: "dense", storage: Storage::Growing, cache: &[16], layers_per_cell: 2, width: Width::Chunks(1), ..PLAIN },
    ];
    check_bits(&cases);
}

/// The grid keeps graphs, too.
#[test]
fn kept_graphs_are_exact() {
    let cases = [KINDS, KINDS.map(|case| whole(&case))].concat().into_iter().enumerate();
    prove("kept graphs", &cases.map(|(at, case)| Case { kept: SOME_AND_ALL[at % 3], ..case }).collect::<Vec<_>>());
    // Stores that round are not asked for what is kept.
    let rounds = Case { undo_log: INT8, kept: 1000, ..whole(&PLAIN) };
    prove("kept graphs beside rounding stores", &[rounds, Case { layers_per_cell: 1, layer_checkpoints: INT8, ..rounds }]);
}

/// Counts columns and cells that are run.
#[derive(Default, PartialEq, Eq, Debug)]
struct Counts {
    replays: usize,
    again: usize,
    kept: usize,
}

impl Observer for Counts {
    fn observe(&mut self, event: Event, _: &dyn Fn() -> MemoryByPart) {
        match event {
            Event::Replay { .. } => self.replays += 1,
            Event::Cell { is_kept: false, .. } => self.again += 1,
            Event::Cell { is_kept: true, .. } => self.kept += 1,
            _ => {}
        }
    }
}

/// What is kept is not computed again, and leaves nothing in the stores.
#[test]
fn nothing_is_computed_again_whose_graph_is_kept() {
    for (layers_per_cell, kept, expected) in [
        (1, 0, [2, 12, 0]),
        (1, 3, [2, 9, 3]),
        (1, 5, [2, 8, 4]),
        (1, 8, [1, 4, 8]),
        (1, 100, [0, 0, 12]),
        (3, 1, [0, 3, 1]),
        (3, 4, [0, 0, 4]),
    ] {
        let case = Case { layers_per_cell, kept, ..PLAIN };
        let (model, mut counts) = (support::model(&case), Counts::default());
        let engine = support::engine(&case, &model);
        engine.gradients(&model, &support::batch(&case), support::context(&case), &mut counts).unwrap();
        assert_eq!([counts.replays, counts.again, counts.kept], expected, "{layers_per_cell} layers, {kept} kept");
        let waits = |store: &kvtune::store::Store| store.bytes().most.0 > 0;
        let [_, again, _] = expected;
        assert_eq!(waits(&engine.stores().undo_log), again > 0);
        assert_eq!(waits(&engine.stores().layer_checkpoints), again > 4 && layers_per_cell == 1);
    }
}
