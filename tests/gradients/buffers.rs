//! The proof for every way to keep entries: the gradient through a quantised, offloaded or paged cache is that of masked dense
//! autograd through the same quantisation, differentiated as the identity.

use kvtune::recipe::{BufferKind, Storage};

use crate::support::case::{Case, HeadKind, PLAIN, TargetsAt, Width, prove, run};

const POLICIES: [(&str, &str); 10] = [
    ("lastrec", "init_grace_tokens = 3"),
    ("h2o", "grace_period = 4"),
    ("h2o-vlen", ""),
    ("qh2o", "combination_constant = 0.3"),
    ("qh2o-vlen", "grace_period = 2\nnormalize_scores = true"),
    ("keydiff", ""),
    ("tova", ""),
    ("snapkv", "kernel_size = 3"),
    ("adakv", "floor = 0.4\npolicy.snapkv = { window_size = 2 }"),
    ("expected-attention", "init_grace_tokens = 1"),
];

const BUFFERS: [BufferKind; 2] = [BufferKind::Int8, BufferKind::Int4];

#[test]
fn every_quantised_buffer() {
    for buffer in BUFFERS {
        let cases: Vec<Case> = POLICIES
            .iter()
            .flat_map(|&(policy, params)| {
                let case = Case { name: "quantised", policy, params, buffer, ..PLAIN };
                [
                    case,
                    Case { name: "one chunk a cell", width: Width::Chunks(1), ..case },
                    Case { name: "one cell", layers_per_cell: 3, width: Width::Chunks(100), ..case },
                    Case { name: "two layers a cell, by the rule", layers_per_cell: 2, width: Width::Multiplier(1.0), ..case },
                    Case { name: "one KV head", heads: (4, 1), lengths: &[19, 44], ..case },
                    Case { name: "classification", head: HeadKind::Classify, dropout: 0.1, ..case },
                ]
            })
            .collect();
        prove(buffer.name(), &cases);
    }
}

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
    let mut cases = Vec::new();
    for (buffer, (policy, params)) in [
        (BufferKind::Plain, POLICIES[0]),
        (BufferKind::Plain, POLICIES[1]),
        (BufferKind::Int8, POLICIES[3]),
        (BufferKind::Int4, POLICIES[5]),
        (BufferKind::Int8, POLICIES[8]),
    ] {
        for layers_per_cell in [1, 2, 3] {
            for width in [Width::Chunks(1), Width::Chunks(3), Width::Chunks(100)] {
                cases.push(Case {
                    name: "offloaded",
                    policy,
                    params,
                    buffer,
                    is_offloaded: true,
                    layers_per_cell,
                    width,
                    ..PLAIN
                });
            }
        }
    }
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
