//! The proof for every way to keep entries: the gradient through a quantised, offloaded or paged cache is that of masked dense
//! autograd through the same quantisation, differentiated as the identity.

use kvtune::recipe::{BufferKind, Storage};

use crate::support::case::{Case, PLAIN, TargetsAt, Width, prove, run};
use crate::support::grid::each_policy;

#[test]
fn quantised_dense_caches_of_every_storage() {
    let mut cases = Vec::new();
    for buffer in [BufferKind::Plain, BufferKind::Int8, BufferKind::Int4] {
        for (storage, cache) in [(Storage::Preallocated, &[50][..]), (Storage::Growing, &[16]), (Storage::Paged, &[16])] {
            let case = Case { name: "dense", policy: "dense", buffer, storage, cache, ..PLAIN };
            cases.extend([case, Case { name: "dense, one cell", layers_per_cell: 3, width: Width::Chunks(100), ..case }]);
            cases.push(Case { name: "dense, narrow", chunk: 3, width: Width::Chunks(1), targets: TargetsAt::Last(3), ..case });
        }
    }
    prove("dense", &cases);
}

#[test]
fn entries_that_wait_on_the_host() {
    // Each policy once, each tiling with a third of them; the grid has each policy with two buffers on the host.
    let tilings = [(1, Width::Chunks(1)), (2, Width::Chunks(100)), (3, Width::Chunks(3))].into_iter().cycle();
    let of = |(case, (layers_per_cell, width))| Case { name: "offloaded", is_offloaded: true, layers_per_cell, width, ..case };
    let mut cases: Vec<Case> = each_policy().into_iter().zip(tilings).map(of).collect();
    cases.push(Case { name: "offloaded, paged", policy: "dense", storage: Storage::Paged, is_offloaded: true, ..PLAIN });
    prove("offloaded", &cases);
}

/// Quantisation must change something, or nothing was proved; and waiting must not.
#[test]
fn buffers_change_what_they_should() {
    let loss = |case: Case| run(&case).loss;
    let case = Case { policy: "lastrec", ..PLAIN };
    let plain = loss(case);
    assert!((plain - loss(Case { buffer: BufferKind::Int8, ..case })).abs() > 1e-6);
    assert!((plain - loss(Case { buffer: BufferKind::Int4, ..case })).abs() > 1e-4);
    let waiting = loss(Case { is_offloaded: true, ..case });
    assert_eq!(plain.to_bits(), waiting.to_bits());
}
